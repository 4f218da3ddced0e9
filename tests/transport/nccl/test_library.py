"""Which NCCL a process loads through CuPy, and the errors where it cannot be used."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from ringdp import CommunicationError, UsageError
from ringdp.transport.nccl.library import HOST, binding, check_loaded, communicator, loaded
from tests.transport.nccl.faults import only_with_host_nccl

only_with_host_nccl()
nccl = binding(host=True)


def test_nonblocking_communicators_are_refused():
    """As with NCCL_COMM_BLOCKING=0: CuPy raises KeyError for results that it does not know."""
    answers = SimpleNamespace(
        NcclError=nccl.NcclError, NcclCommunicator=lambda *_: nccl.NcclError(7)
    )
    with pytest.raises(CommunicationError, match=r"answered 7 .*NCCL_COMM_BLOCKING=1"):
        communicator(answers, 2, bytes(128), 0)


def test_a_process_must_have_loaded_exactly_one_nccl():
    assert loaded() == [str(HOST)]
    check_loaded([str(HOST)], host=True)
    check_loaded(["/lib/libnccl.so.2"], host=False)
    with pytest.raises(UsageError, match="has loaded none"):
        check_loaded([], host=False)
    with pytest.raises(UsageError, match=r"has loaded /a/libnccl\.so\.2, /b/libnccl"):
        check_loaded(["/a/libnccl.so.2", "/b/libnccl.so.2"], host=False)
    with pytest.raises(UsageError, match=r"asked for NCCL; this process has already loaded .*host"):
        binding(host=False)


@pytest.mark.parametrize(("host", "extra"), [(True, "nccl]'"), (False, "cuda13]' or")])
def test_the_error_of_a_missing_cupy_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, host: bool, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs.nccl", None)
    with pytest.raises(UsageError, match=r"needs CuPy .*: pip install 'ringdp\[" + extra):
        binding.__wrapped__(host=host)
