"""The exception tree: every error that ringdp raises on purpose.

    RingdpError
    ├── UsageError              a bad argument: what was given, what is allowed (also ValueError)
    │   └── ModelError          a model or training loop that is not supported (also RuntimeError)
    ├── CheckpointError         a checkpoint that cannot be written, read, or used for this model
    ├── ScheduleError           a schedule breaks a rule: names round, transfer, rank and chunk
    └── CommunicationError      a collective could not finish (also RuntimeError, as torch's)
        ├── PeerLost            a rank died, or closed or aborted the communicator
        ├── CollectiveTimeout   a rank did not arrive in time
        └── CollectiveMismatch  two ranks issued different collectives

After a CommunicationError the communicator is unusable: the ranks no longer agree on what was
exchanged, so every later call raises the same error. To recover, call `Communicator.abort` and then
`ringdp.init` on every rank.
"""


class RingdpError(Exception):
    """Base class of all ringdp errors."""


class UsageError(RingdpError, ValueError):
    """A bad argument. The message says what was given and what is allowed."""


class ModelError(UsageError, RuntimeError):
    """DistributedDataParallel does not support this model, training loop or argument, and torch's
    would raise RuntimeError; ranks passed different models to `shard`; or gradients overflow at the
    least loss scale that the config of `initialize` allows."""


class CheckpointError(RingdpError):
    """A checkpoint cannot be written, read, or used for this model."""


class ScheduleError(RingdpError):
    """A schedule breaks a rule or does not meet its contract."""


class CommunicationError(RingdpError, RuntimeError):
    """A collective could not finish."""


class PeerLost(CommunicationError):
    """A rank died, or closed or aborted the communicator, before the collective finished."""


class CollectiveTimeout(CommunicationError):
    """The collective waited for a rank that did not arrive in time."""


class CollectiveMismatch(CommunicationError):
    """Two ranks issued different collectives, or the same one with different sizes."""
