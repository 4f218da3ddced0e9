"""DDP's error messages for a backward that its arguments do not allow, with torch's wording."""

from __future__ import annotations

from collections.abc import Mapping

from ringdp.parallel.ddp.arguments import Settings


def advice(settings: Settings) -> str:
    """What to do about gradients that did not come."""
    if settings.static_graph:
        return (
            "This error indicates that your training graph has changed in this iteration, e.g., "
            "one parameter is used in first iteration, but then got unused in the second "
            "iteration. this is not compatible with static_graph set to True."
        )
    outputs = "making sure all `forward` function outputs participate in calculating loss"
    if settings.find_unused_parameters:
        return (
            "Since `find_unused_parameters=True` is enabled, this means that backward raised, or "
            "that not all outputs were found, which are looked for in containers and dataclasses. "
            f"You can fix the latter by {outputs}."
        )
    return (
        "This error indicates that your module has parameters that were not used in producing "
        "loss, or that backward raised. You can enable unused parameter detection by passing the "
        "keyword argument `find_unused_parameters=True` to DistributedDataParallel, and by "
        f"{outputs}."
    )


def unfinished(settings: Settings, rank: int, lost: Mapping[int, str]) -> str:
    """Some gradients of the last backward did not come. `lost`: their parameters, index -> name."""
    expected = (
        "Expected to have finished reduction in the prior iteration before starting a new one"
    )
    if not lost:
        return f"{expected}, but an error ended it when all gradients had come: look for that one."
    return (
        f"{expected}. "
        f"{advice(settings)}\nParameter indices which did not receive grad for rank {rank}: "
        f"{' '.join(map(str, lost))}\nParameters which did not receive grad for rank {rank}: "
        # torch's class advises this variable, since it leaves the names out without it.
        f"{', '.join(lost.values())}. These are all of them: there is no need to set the "
        "environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or DETAIL."
    )


def once_more(name: str, settings: Settings) -> str:
    if settings.static_graph:
        return (
            "Your training graph has changed in this iteration, which is not compatible with "
            f"static_graph set to True: {name} got more gradients than in the first one."
        )
    return (
        f"Expected to mark a variable ready only once: {name} has been marked as ready twice, as "
        "happens where a module is used twice under reentrant checkpointing. Pass "
        "use_reentrant=False to torch.utils.checkpoint, or static_graph=True to "
        "DistributedDataParallel."
    )


def again(name: str) -> str:
    return (
        f"Expected one backward after a forward with find_unused_parameters=True: {name} has got a "
        "gradient in another one, and had counted as unused when the first was reduced. Add the "
        "losses up and call backward once, or leave find_unused_parameters False."
    )
