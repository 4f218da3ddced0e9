"""The exception tree: every error that ringdp raises on purpose.

    RingdpError
    ├── UsageError              a bad argument: what was given, what is allowed (also ValueError)
    │   └── ModelError          a model or a loop that does not fit (also RuntimeError, as torch's)
    ├── CheckpointError         a checkpoint that cannot be written, read, or used for this model
    ├── ScheduleError           a schedule breaks a rule: names round, transfer, rank and chunk
    └── CommunicationError      a collective could not finish (also RuntimeError, as torch's)
        ├── PeerLost            a rank has died, closed the communicator or aborted it
        ├── CollectiveTimeout   a rank that it waited for is late
        └── CollectiveMismatch  two ranks issued different collectives

After a CommunicationError the communicator is unusable: the ranks no longer agree on what was
exchanged, so every later call on it raises the same error. `Communicator.abort` and another
`ringdp.init` bring the ranks together again.
"""


class RingdpError(Exception):
    """Root of the tree."""


class UsageError(RingdpError, ValueError):
    """A bad argument. The message says what was given and what is allowed."""


class ModelError(UsageError, RuntimeError):
    """DistributedDataParallel cannot serve this model, this training loop, or these arguments, and
    torch's would raise RuntimeError; or ranks gave `shard` different models."""


class CheckpointError(RingdpError):
    """A checkpoint cannot be written, read, or used for this model."""


class ScheduleError(RingdpError):
    """A schedule breaks a rule or does not meet its contract."""


class CommunicationError(RingdpError, RuntimeError):
    """A collective could not finish."""


class PeerLost(CommunicationError):
    """A rank has died, or has closed or aborted the communicator, before the collective's end."""


class CollectiveTimeout(CommunicationError):
    """A rank that the collective waited for did not arrive in time."""


class CollectiveMismatch(CommunicationError):
    """Two ranks issued different collectives, or the same one with different sizes."""
