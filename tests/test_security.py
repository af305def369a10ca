"""What SECURITY.md promises: nothing is unpickled or executed, and a run listens only where it says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import tasks
from support.ranks import Pool

SOURCE = Path(__file__).parents[1] / "src" / "conadv"
# Modules that run code from the data they read, and calls that do.
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml", "tarfile.extractall"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load", "torch.hub.load"}
OBJECTS = ("_object", "_object_list")  # of torch.distributed, which pickles them
EXTRACTS = {"extract", "extractall", "unpack_archive"}
# The one module that may import pickle, and all that it may use of it: its unpickler has its own names
# (tests/task/data/test_arrays.py tries to make it call something).
RESTRICTED, OF_PICKLE = "task/data/cifar.py", {"pickle._Unpickler"}


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_module_reads_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            if path == SOURCE / RESTRICTED and ast.unparse(node) == "import pickle":
                continue
            assert not MODULES & {name.split(".")[0] for name in names}, ast.unparse(node)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            assert ast.unparse(node) in OF_PICKLE
    for name, call in calls(path):
        assert name not in CALLS and not name.endswith(OBJECTS), ast.unparse(call)
        assert name.rpartition(".")[2] not in EXTRACTS, ast.unparse(call)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("shell", "False") == "False", ast.unparse(call)
        if name.endswith("np.load"):
            assert options["allow_pickle"] == "False", ast.unparse(call)


@pytest.mark.parametrize("layout", ["none", "clean+adv | attack"])
def test_ranks_train_where_nothing_can_be_unpickled(pool: Pool, tmp_path: Path, layout: str) -> None:
    """Flags, checkpoints, twins and verdicts cross between ranks as bytes, numbers and JSON."""
    changes = {"epochs": 1, "layout": layout, "method": "conadv"}
    assert pool.run(2, tasks.train_without_pickle, str(tmp_path / "run"), changes) == [0, 0]


def test_a_single_process_listens_nowhere(pool: Pool) -> None:
    assert pool.run(1, tasks.listening_addresses, {}) == [[]]


def test_ranks_on_one_machine_can_be_kept_to_it(pool: Pool) -> None:
    """With GLOO_SOCKET_IFNAME=lo; the store is torchrun's, and listens on all interfaces as SECURITY.md says."""
    for addresses in pool.run(2, tasks.listening_addresses, {"GLOO_SOCKET_IFNAME": "lo"}):
        assert addresses and all(address in ("127.0.0.1", "::1") for address in addresses)
