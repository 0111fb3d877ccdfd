"""Each count of the report finds what is planted, and leaves what is near it alone."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.house import report
from tests.house.report import Tree


def plant(**files: str) -> Tree:
    """Return a tree: "roles__worker" is echo/roles/worker.py, and "test__a" is tests/a.py."""
    paths = {name.replace("__", "/") + ".py": text for name, text in files.items()}
    return Tree(
        {
            path if path.startswith("tests/") else f"echo/{path}": dedent(text)
            for path, text in paths.items()
        }
    )


def names(found: list[report.Place]) -> list[str]:
    return [place.name for place in found]


def test_lines_are_code_or_documentation_or_neither() -> None:
    tree = plant(
        core__units='''
        """A module.

        Its second paragraph."""

        A = 1  # why
        # a line of its own
        class C:
            x: int
            """A field."""
            text = """not
            documentation"""
        '''
    )
    [path] = tree.modules
    assert report.lines_of_code(tree) == {path: 5}
    assert report.lines_of_docstring(tree) == {path: 4}
    assert report.lines(tree)[path] == 12


SCHEMA = """
class Section(BaseModel): ...
class PricedSection(Section):
    price: float = 0.0
class WorkerSection(PricedSection):
    roles: ClassVar[tuple[str, ...]] = ()
    name: str
    _hidden: int = 0
class Config(Section):
    profile: str
    worker: WorkerSection
    learner: PricedSection
"""


def test_keys_are_counted_with_what_a_section_inherits() -> None:
    keys = names(report.keys(plant(config__schema=SCHEMA)))
    assert sorted(keys) == ["learner.price", "profile", "worker.name", "worker.price"]


def test_classes_that_share_a_section_count_a_name_once() -> None:
    tree = plant(
        config__schema="""
        from echo.config.losses import GrpoLoss, GspoLoss
        class Config(Section):
            loss: Annotated[GrpoLoss | GspoLoss, Field(discriminator="kind")]
        """,
        config__losses="""
        class Loss(Section):
            kind: str
        class GrpoLoss(Loss):
            clip_low: float
            dual_clip: float
        class GspoLoss(Loss):
            clip_low: float
        """,
    )
    assert sorted(names(report.keys(tree))) == ["loss.clip_low", "loss.dual_clip", "loss.kind"]


def test_keys_of_fleets_are_counted_apart() -> None:
    rows = "class Row(BaseModel): ...\nclass OfferRow(Row):\n    price: float\n    region: str"
    tree = plant(config__schema=SCHEMA, config__fleet_file=rows)
    assert names(report.fleet_keys(tree)) == ["OfferRow.price", "OfferRow.region"]
    assert len(report.keys(tree)) == 4


def test_constants_are_names_in_capitals_at_the_top_of_a_module() -> None:
    tree = plant(core__a="A_S: float = 1.0\n_B, C2 = 1, 2\nlog = 3\ndef f():\n    D = 1")
    assert names(report.constants(tree)) == ["A_S", "_B", "C2"]


def test_constructors_are_counted_above_eight_parameters() -> None:
    few = "class Few:\n    def __init__(self, a, b, c, d, e, f, g, *, h): ..."
    many = "class Many:\n    def __init__(self, a, b, c, d, e, f, g, *, h, i): ..."
    assert names(report.constructors(plant(core__a=few, core__b=many))) == ["Many (9)"]


def test_callbacks_are_found_behind_aliases_of_other_files() -> None:
    tree = plant(
        core__a="""
        from collections.abc import Callable
        Later = Callable[[], None]
        TABLE = {"a": Callable}
        def f(now: Callable[[], float], table: dict[str, Callable[[], None]], n: int): ...
        """,
        core__b="""
        from echo.core.a import Later
        class C:
            def m(self, later: Later | None): ...
        """,
    )
    assert names(report.callbacks(tree)) == ["f(now)", "m(later)"]


def test_exiles_take_another_files_class_first() -> None:
    tree = plant(
        weights__receiver="""
        class Receiver:
            def __init__(self) -> None: ...
        @dataclass(frozen=True)
        class Settings:
            bound: int
        @dataclass
        class Buffer:
            held: int
        def inside(receiver: Receiver) -> None: ...
        """,
        weights__room="""
        from echo.weights.receiver import Buffer, Receiver, Settings
        from echo.wire.messages import Lease
        def fill(buffer: Buffer) -> None: ...
        def make_room(receiver: Receiver) -> None: ...
        def read(settings: Settings) -> None: ...
        def second(count: int, receiver: Receiver) -> None: ...
        class C:
            def method(self, receiver: Receiver) -> None: ...
        def ask(lease: Lease) -> None: ...
        """,
        wire__messages="""
        class Message(msgspec.Struct): ...
        class Lease(Message): ...
        """,
    )
    exiles = ["fill(buffer: Buffer)", "make_room(receiver: Receiver)"]
    records = ["read(settings: Settings)", "ask(lease: Lease)"]
    assert names(report.exiles(tree)) == exiles + records
    assert names(report.exiles_of_objects(tree)) == exiles


def test_what_stays_has_a_reason_that_names_it() -> None:
    tree = plant(
        core__a="""
        def f(now: Callable[[], float], then: Callable[[], None]): ...
        """
    )
    reasons = '[callbacks]\n"echo/core/a.py: f(now)" = "a clock"\n"echo/core/a.py: g(x)" = "gone"'
    tree.files[report.REASONS] = reasons
    assert "2 (1 with a reason)" in report.legend(tree)
    assert report.idle_reasons(tree) == ["callbacks: echo/core/a.py: g(x)"]


def test_re_exports_are_found() -> None:
    tree = plant(core__a="X = 1", core__b="from echo.core.a import X as X\nimport json as js")
    assert names(report.re_exports(tree)) == ["X"]


def test_lone_files_are_short_and_have_one_importer() -> None:
    tree = plant(
        core__alone="",
        core__shared="",
        core__long="\n" * 200,
        core__user="from echo.core import alone, shared, long\nimport echo.core.shared",
        core__other="def f():\n    from echo.core.shared import x",
    )
    assert names(report.lone_files(tree)) == ["for echo/core/user.py"]
    assert report.lone_files(tree)[0].path == "echo/core/alone.py"


def test_public_names_are_found_twice() -> None:
    tree = plant(
        core__a="class Link: ...\ndef _f(): ...\ndef main(): ...",
        core__b="class Link: ...\ndef _f(): ...\ndef main(): ...\ndef C(Link): ...",
    )
    assert names(report.twice_used_names(tree)) == ["Link", "Link"]


def test_docstrings_that_begin_with_a_question_are_found() -> None:
    tree = plant(core__a='"""What a node is."""', core__b='"""Whatever lives."""', core__c="")
    assert names(report.questions(tree)) == ["What a node is."]


@pytest.mark.parametrize(
    "line",
    [
        "class LaneLink: ...",
        "def f(num_lanes): ...",
        "MAX_PARCELS = 1",
        "class C:\n    def __init__(self):\n        self._judges = 1",
        "class C:\n    settled: int",
        "class Chunk(Message, tag='parcel'): ...",
        "log.warning(f'no room for {n}')",
        "note = Note('error', 'the arena is full')",
        "def f():\n    raise StorageError(f'{a}: arena')",
        "counters['groups/outrun'] += 1",
    ],
)
def test_old_words_are_found_where_they_reach_anybody(line: str) -> None:
    assert len(report.words(plant(core__a=line))) == 1


def test_old_words_are_found_in_the_names_of_files() -> None:
    assert names(report.words(plant(engine__vllm_last_words=""))) == ["last_words: vllm_last_words"]


@pytest.mark.parametrize(
    "line",
    [
        '"""There is room for a draft."""',
        "def f():\n    lane = 1",
        "LOG = {'mushroom': 'no room for it'}",
        "class Plane: ...",
        "f('the arena is full')",
    ],
)
def test_other_words_are_left_alone(line: str) -> None:
    assert report.words(plant(core__a=line)) == []


def test_tests_are_counted_by_directory() -> None:
    tree = plant(
        tests__core__test_a="def test_a(): ...\nclass T:\n    async def test_b(self): ...",
        tests__core__harness="def test_no(): ...",
    )
    assert report.Column("tests", report.tests).by_package(tree) == {"core": 2}


def test_cpu_seconds_come_from_the_budget() -> None:
    tree = Tree({"tests/budget.toml": "[cpu_s]\ncore = 4.4\ntop = 10"})
    assert report.Column("cpu", report.cpu_seconds).by_package(tree) == {"core": 4, "(top)": 10}


def test_the_table_shows_before_and_after_by_package_and_in_total() -> None:
    before = plant(core__a="A = 1", core__b="", errors="")
    rows = report.table(before, plant(core__a="A = 1", roles__b="", errors="")).splitlines()
    files = {row.split()[0]: row.split()[1] for row in rows[1:]}
    assert files == {"(top)": "1", "core": "2>1", "roles": "0>1", "total": "3"}
    assert rows[0].split()[:2] == ["files", "lines"]


def test_a_commit_is_read_without_a_checkout(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True)

    (tmp_path / "echo").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "echo/a.py").write_text("A = 1\n")
    (tmp_path / "tests/test_a.py").write_text("")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "Begin")
    (tmp_path / "echo/a.py").write_text("A = 2\n")
    assert report.tree_at("HEAD", tmp_path).files["echo/a.py"] == "A = 1\n"
    assert report.working_tree(tmp_path).files["echo/a.py"] == "A = 2\n"
