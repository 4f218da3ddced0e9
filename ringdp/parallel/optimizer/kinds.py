"""What an optimizer looks at: elements, whole parameters, or all of the model's at once."""

from __future__ import annotations

from torch.optim import Optimizer

from ringdp.errors import UsageError

# Classes, torch's and others', that look at a whole parameter: those with such a part in their
# names, as users' own often have, and these.
_PARTS = ("adafactor", "muon", "psgd", "shampoo", "soap")
_BY_PARAMETER = {
    "AdamP", "CAME", "GaLoreAdamW", "Kron", "LAMB", "LARS", "Lamb", "LaPropOrtho", "Lars", "Mars",
    "NovoGrad", "NvNovoGrad", "OrthoLaProp", "SGDP", "Scion", "StableAdamW",
}  # fmt: skip
# These look at all of them at once, or communicate themselves.
_BY_MODEL = {"Adai", "FusedLAMB", "FusedNovoGrad", "LBFGS", "MuonWithAuxAdam"}
# These sum over all parameters and, where they are told to, over all ranks.
_SUMS_IF_TOLD = {
    "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD", "Prodigy",
}  # fmt: skip


def needs_whole(optimizer: Optimizer) -> bool:
    """Whether it looks at whole parameters. Its attribute `needs_whole_parameters` says so of a
    class that is not known here, which is otherwise taken for one that looks at elements."""
    told: bool | None = getattr(optimizer, "needs_whole_parameters", None)
    if told is not None:
        return told
    cautious = any(group.get("caution") for group in optimizer.param_groups)  # a mean over each
    names = _names(optimizer)
    named = any(part in name.lower() for name in names for part in _PARTS)
    return cautious or named or not _BY_PARAMETER.isdisjoint(names)


def check_slices(optimizer: Optimizer, where: str, otherwise: str) -> None:
    """Raise UsageError if it looks at all parameters at once, of which a rank has a part."""
    names, groups = _names(optimizer), optimizer.param_groups
    what = type(optimizer).__name__
    if any(group.get("max_grad_norm") for group in groups):
        what += " with a max_grad_norm"
    elif names & _SUMS_IF_TOLD and not all(group.get("fsdp_in_use") for group in groups):
        what += " without fsdp_in_use=True"
    elif not names & _BY_MODEL:
        return
    raise UsageError(
        f"{what} looks at all parameters at once, of which a rank has a part {where}; allowed: "
        f"optimizers that step each element, or each parameter, by itself, {otherwise}"
    )


def _names(optimizer: Optimizer) -> set[str]:
    return {kind.__name__ for kind in type(optimizer).__mro__}
