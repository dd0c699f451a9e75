"""Imports go one way, and what a layer must not know it does not name (G5)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "memtrain"

# From left to right: a module imports from its left, and from its own subpackage. `memtrain` itself holds the public names.
LAYERS = (
    ("memtrain.units", "memtrain.require"),
    ("memtrain.device", "memtrain.precision", "memtrain.method"),
    ("memtrain.job",),
    ("memtrain.plan", "memtrain.machine"),
    ("memtrain.check",),
    (
        "memtrain.schedule",
        "memtrain.metrics",
        "memtrain.signals",
        "memtrain.watchdog",
        "memtrain.leaks",
        "memtrain.out_of_memory",
        "memtrain.generators",
        "memtrain.callbacks",
    ),
    ("memtrain.trace.event",),
    ("memtrain.memory",),
    ("memtrain.data", "memtrain.place", "memtrain.distributed"),
    ("memtrain.checkpoint",),
    ("memtrain.checkpoint_writer",),
    ("memtrain.models",),
    (
        "memtrain.inputs",
        "memtrain.resume",
        "memtrain.conduct",
        "memtrain.evaluation",
        "memtrain.trackers",
    ),
    ("memtrain.features",),
    ("memtrain.run",),
    ("memtrain.state",),
    ("memtrain.keeper",),
    ("memtrain.trace",),
    ("memtrain.planner",),
    ("memtrain.report", "memtrain.measure", "memtrain.recovery", "memtrain.not_finite"),
    ("memtrain.loop",),
    ("memtrain.session",),
    ("memtrain.setbacks", "memtrain.around"),
    ("memtrain.training",),
    ("memtrain.ending",),
    ("memtrain.course", "memtrain.hf"),
    ("memtrain.trainer",),
    ("memtrain.schema", "memtrain.settings"),
    ("memtrain.config",),
    ("memtrain.command_line", "memtrain.recipe_rows", "memtrain.rows_view"),
    ("memtrain.recipe",),
    ("memtrain.__main__",),
    ("memtrain",),
)
LONGEST_FILE_LINES = 400


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int:
    """Position of the layer whose name is the longest beginning of the module's."""
    names = {name: position for position, members in enumerate(LAYERS) for name in members}
    return names[max((name for name in names if is_in(module, name)), key=len)]


def imports(tree: ast.Module, modules: Mapping[str, object]) -> set[str]:
    """Every module that is imported, those inside functions and for type checking included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import does not say which layer it reaches into"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules else str(node.module))
    return found


IMPORTS = {name: imports(tree, MODULES) for name, tree in MODULES.items()}


def own(imported: set[str]) -> set[str]:
    return {name for name in imported if is_in(name, "memtrain")}


def foreign(imported: set[str]) -> set[str]:
    """Top-level names of the imported modules that are not memtrain's."""
    return {name.partition(".")[0] for name in imported - own(imported)}


def within(*packages: str) -> Iterator[tuple[str, set[str]]]:
    """Each module of the packages with what it imports."""
    found = [(name, IMPORTS[name]) for name in MODULES if any(is_in(name, package) for package in packages)]
    assert found, f"no module is called {' or '.join(packages)}"
    yield from found


def reached(module: str) -> set[str]:
    """Everything that the module imports, directly or through memtrain's own modules."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        for name in IMPORTS.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def names(tree: ast.Module) -> set[str]:
    """Every dotted name in the code, comments and strings left out."""
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute | ast.Name)}
    imported = {
        f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    return dotted | imported | imports(tree, {})


def test_the_reader_sees_imports_wherever_they_stand() -> None:
    source = "import a.b\nfrom p import m, n\nif TYPE_CHECKING:\n    from q import K\ndef f():\n    import r as s\n"
    assert imports(ast.parse(source), {"p.m": None}) == {"a.b", "p.m", "p", "q", "r"}


def test_the_reader_sees_names_in_code_and_not_in_words() -> None:
    found = names(ast.parse("from torch import cuda\n'''torch.mps'''\nx = torch.xpu.is_available()  # torch.mtia\n"))
    assert {"torch.cuda", "torch.xpu", "torch.xpu.is_available"} <= found
    assert found.isdisjoint({"torch.mps", "torch.mtia"})


def test_every_layer_is_there() -> None:
    used = {layer(module) for module in MODULES}
    assert used == set(range(len(LAYERS)))
    assert all(any(is_in(module, name) for module in MODULES) for members in LAYERS for name in members)


def test_every_module_has_its_layer() -> None:
    assert [name for name in MODULES if layer(name) == len(LAYERS) - 1] == ["memtrain"]


@pytest.mark.parametrize("module", [name for name in MODULES if name != "memtrain"])
def test_a_module_imports_from_its_left_or_its_own_subpackage(module: str) -> None:
    package = module.rpartition(".")[0]
    beside = {name for name in own(IMPORTS[module]) if package != "memtrain" and is_in(name, package)}
    assert [name for name in sorted(own(IMPORTS[module]) - beside) if layer(name) >= layer(module)] == []


def test_no_modules_import_one_another() -> None:
    TopologicalSorter({name: own(imported) for name, imported in IMPORTS.items()}).prepare()


def test_features_take_plain_arguments_and_know_neither_job_nor_plan() -> None:
    for module, imported in within("memtrain.features"):
        assert imported.isdisjoint({"memtrain.job", "memtrain.plan"}), module
        assert foreign(imported).isdisjoint({"hydra", "omegaconf"}), module


def test_memory_knows_events_units_the_device_and_the_budget() -> None:
    for module, imported in within("memtrain.memory"):
        outside = {name for name in own(imported) if not is_in(name, "memtrain.memory")}
        assert outside <= {"memtrain.trace.event", "memtrain.units", "memtrain.device", "memtrain.job"}, module


@pytest.mark.parametrize(
    "package",
    [
        *("memtrain.units", "memtrain.device", "memtrain.job", "memtrain.plan", "memtrain.schedule", "memtrain.metrics"),
        *("memtrain.trace.event", "memtrain.memory", "memtrain.report"),
        *(f"memtrain.planner.{name}" for name in ("candidates", "choice", "compare", "cost")),
    ],
)
def test_what_needs_no_tensor_never_reaches_torch(package: str) -> None:
    for module, _ in within(package):
        assert "torch" not in foreign(reached(module)), module


def test_only_the_command_line_knows_hydra() -> None:
    for module, imported in IMPORTS.items():
        if layer(module) < layer("memtrain.schema"):
            assert foreign(imported).isdisjoint({"hydra", "omegaconf"}), module


def test_the_step_does_not_ask_where_it_runs() -> None:
    questions = {"is_available", "FakeTensor", "FakeTensorMode", "is_meta", "environ", "getenv"}
    for module, _ in within("memtrain.run", "memtrain.features", "memtrain.models"):
        asked = {part for name in names(MODULES[module]) for part in name.split(".")} & questions
        assert not asked, module


def test_cuda_is_asked_at_the_edges_only() -> None:
    edges = {"memtrain.machine", "memtrain.generators", "memtrain.measure", "memtrain.trace.profile"}
    for module, tree in MODULES.items():
        if module not in edges:
            assert not [name for name in names(tree) if is_in(name, "torch.cuda")], module


def test_every_file_is_short_enough_to_read_at_once() -> None:
    files = [*PACKAGE.rglob("*.py"), *TESTS.rglob("*.py")]
    lines = {str(path.relative_to(TESTS.parent)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: count for name, count in lines.items() if count >= LONGEST_FILE_LINES} == {}
