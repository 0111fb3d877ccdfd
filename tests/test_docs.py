"""README.md, AGENTS.md, CONTRIBUTING.md and docs/ tell the truth about this checkout."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import metrics_page
import pytest
from pydantic import BaseModel
from reference_pages import configuration_page, fleet_page

from echo.cli import parsers
from echo.cli.commands.node import dry_run
from echo.cli.main import COMMANDS
from echo.config.fleet_schema import JobRow, SimRow
from echo.config.load import load_config
from echo.config.other_names import ELSEWHERE, names_table, translations
from echo.config.schema import find_leaf, sections
from echo.core.extras import ROLES
from echo.core.records import Record
from echo.tasks.environment import Environment
from echo.tasks.task import Example, load_task
from echo.train import batch
from echo.wire.messages import REASONS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
]
OF_OTHERS = DOCS / "coming-from-other-frameworks.md"
"""The page whose keys are those of other frameworks, but for its last column."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

BENCH = ROOT / "bench" / "README.md"
FIRST_RUN = DOCS / "first-real-run.md"


def each(*pages: Path) -> pytest.MarkDecorator:
    """Run a test once for each page."""
    return pytest.mark.parametrize("page", pages, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in these languages; "" is a block without one."""
    found: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```", text_of(page), re.M | re.S)
    return [code for language, code in found if language in languages]


def files_of(page: Path) -> dict[str, str]:
    """Return name -> text of the files that a page has its reader save."""
    pattern = r"[Ss]ave\s+(?:this|it) as `([\w.]+)`[^`]*?```\w*\n(.*?)^```"
    return dict(re.findall(pattern, text_of(page), re.M | re.S))


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)


def spans(text: str) -> list[str]:
    """Return what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", text)


# --- links and paths ------------------------------------------------------------------------------


@each(*PAGES, BENCH)
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


@cache
def anchors(page: Path) -> set[str]:
    """Return what can follow a # in a link to a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in headings}


@each(*PAGES, BENCH)
def test_every_path_exists(page: Path) -> None:
    places = r"(?<![\w./-])(?:bin|configs|bench|docs|echo|tests)/[\w./*-]*\w"
    paths = {*re.findall(places, text_of(page))}
    assert [path for path in sorted(paths) if not [*ROOT.glob(path)]] == []


def test_every_page_is_in_the_navigation_the_readme_and_the_index() -> None:
    pages = {path.name for path in DOCS.glob("*.md")}
    assert pages <= set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", text_of(ROOT / "README.md")))
    assert linked == pages - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)", text_of(DOCS / "index.md"))) == linked


# --- keys and metrics -----------------------------------------------------------------------------


def is_key(dotted: str) -> bool:
    """Say whether this is a key of a configuration, a fleet file or a scenario."""
    section, _, name = dotted.partition(".")
    tables: dict[str, type[BaseModel]] = {"job": JobRow, "sim": SimRow}
    if section in tables:
        return name in tables[section].model_fields
    return find_leaf(tuple(dotted.split("."))) is not None


@each(*PAGES)
def test_every_key_that_it_names_exists(page: Path) -> None:
    named = spans(prose(page))
    if page == OF_OTHERS:
        rows = [line.split("|") for line in text_of(page).splitlines() if line.startswith("| ")][1:]
        named = [span for row in rows for span in spans(row[-2])]
    keys = {match[0] for span in named if (match := re.match(r"([a-z]+)\.[a-z_0-9.]+", span))}
    known = {*sections(), "job", "sim"}
    files = re.compile(r".*\.(json|jsonl|md|png|py|toml|txt)$")
    keys = {key for key in keys if key.partition(".")[0] in known and not files.match(key)}
    assert [key for key in sorted(keys) if not is_key(key)] == []
    if page == OF_OTHERS:
        assert len(keys) > 40


@each(*PAGES)
def test_every_metric_that_it_names_exists(page: Path) -> None:
    families = {name.partition("/")[0] for t in metrics_page.MEANINGS.values() for name in t}
    metrics = [
        span for span in spans(prose(page)) if re.fullmatch(r"[a-z_]+(/[a-z0-9_@*]+)+", span)
    ]
    metrics = [name for name in metrics if name.partition("/")[0] in families]
    assert [name for name in metrics if not metrics_page.is_known(name)] == []


@each(*PAGES)
def test_its_configurations_are_understood(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page, "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block, encoding="utf-8")
        role = "worker" if "worker" in tomllib.loads(block) else "learner"
        load_config(file, ["model.name=m", "worker.connect=tcp://10.0.0.5:7700"], role)


def test_the_reference_of_the_configuration_is_that_of_the_schema() -> None:
    remedy = "python docs/reference_pages.py > docs/configuration.md"
    assert text_of(DOCS / "configuration.md") == configuration_page(), remedy


def test_the_reference_of_fleet_files_is_that_of_their_rows() -> None:
    remedy = "python docs/reference_pages.py fleet > docs/fleet-files.md"
    assert text_of(DOCS / "fleet-files.md") == fleet_page(), remedy


def test_the_names_of_other_trainers_are_those_that_messages_know() -> None:
    page = text_of(OF_OTHERS)
    assert names_table() in page, "python docs/reference_pages.py names prints the table"
    assert [name for name in ELSEWHERE if f"`{name}`" not in page] == []


@pytest.mark.slow
def test_the_reference_of_the_metrics_is_that_of_the_code() -> None:
    remedy = "python docs/metrics_page.py > docs/metrics.md"
    assert text_of(DOCS / "metrics.md") == metrics_page.metrics_page(), remedy


# --- commands -------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command on a page, without the variables set before it."""
    lines = [line for code in blocks(page, "", "bash") for line in code.splitlines()]
    lines += [span for span in spans(prose(page)) if " " in span]
    for part in (part.strip() for line in lines for part in line.split("&&")):
        line = re.sub(r"^([A-Z_]+=\S* )+", "", part)
        if re.match(r"(bin/)?echo-\w+ |bin/echo-\w+$|python ", line):
            yield shlex.split(line.partition(" > ")[0], comments=True)


@each(*PAGES, BENCH)
def test_its_commands_are_understood(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for program, *words in commands(page):
        assert (ROOT / program).exists() or not program.startswith("bin/")
        name = program.removeprefix("bin/")
        check_command(f"echo-{words.pop(0)}" if name == "echo-rl" else name, words)


def place_of(file: Path | str) -> Path:
    """Return the path of a file that the page has saved in the current directory, or of ours."""
    return Path(file).absolute() if Path(file).exists() else ROOT / file


def check_command(name: str, words: list[str]) -> None:
    """Check the words after a program, or after `echo-rl` and its command."""
    match name:
        case "echo-node":
            check_node(words)
        case "echo-quickstart":
            task = parsers.quickstart_parser().parse_args(words)
            load_config(
                ROOT / "configs" / parsers.CONFIGS[task.task or "addition"], task.set, "learner"
            )
        case "echo-plan":
            check_files(parsers.plan_parser().parse_args(words).files)
        case "echo-sim":
            simulated = parsers.sim_parser().parse_args(words)
            check_files(simulated.files)
            assert all(is_key(text.partition("=")[0]) for text in simulated.sweep)
        case "echo-setup":
            check_setup(words)
        case "echo-test":
            check_files(ROOT / word for word in words if word.split("=")[0] not in TEST_OPTIONS)
        case "python":
            check_python(words)
        case _ if (command := name.removeprefix("echo-")) in COMMANDS:
            COMMANDS[command].parser().parse_args(words)
        case unknown:
            pytest.fail(f"{unknown}: no check for this program")


TEST_OPTIONS = ("--all", "--fast", "--newest", "--pythons")


def check_files(files: Iterator[Path] | list[Path]) -> None:
    for file in files:
        assert place_of(file).exists(), file


def check_node(words: list[str]) -> None:
    arguments = parsers.node_parser().parse_args(words)
    if not arguments.help_config:
        load_config(place_of(arguments.config), [*arguments.set, "model.name=m"], arguments.role)


def check_setup(words: list[str]) -> None:
    known = {"--role": {*ROLES}, "--extra": {*EXTRAS, "NAME"}}
    while words:
        option = words.pop(0)
        if option not in ("--force", "--lock", "--newest"):
            assert words.pop(0) in known[option]


def check_python(words: list[str]) -> None:
    """Check a line such as `python bench/late_node.py worker --law lognormal`."""
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None, words[1]
        return
    script = place_of(words[0])
    source = "".join(path.read_text(encoding="utf-8") for path in script.parent.rglob("*.py"))
    assert script.exists(), words[0]
    for flag in {word for word in words if word.startswith("--")} - {"--help"}:
        field = flag[2:].replace("-", "_")  # of the settings that some scripts take all
        assert f'"{flag}"' in source or f"\n    {field}: " in source, flag


@each(*PAGES, BENCH)
def test_the_programs_that_it_names_exist(page: Path) -> None:
    named = {span.partition(" ")[0] for span in spans(prose(page)) if span.startswith("echo-")}
    assert named <= {"echo-rl"}  # the only one that pip installs; the others are in bin/


def test_there_are_commands_to_check() -> None:
    named = [words[0] for page in PAGES for words in commands(page)]
    assert named.count("bin/echo-plan") >= 3
    assert named.count("bin/echo-node") >= 12


@pytest.mark.slow
@pytest.mark.parametrize("role", ["relay", "worker"])
def test_what_the_pages_start_would_start(role: str, tiny_model_dir: Path) -> None:
    pages = [page for page in PAGES if page != FIRST_RUN]  # see tests/e2e/test_first_real_run.py
    lines = {tuple(words) for page in pages for words in commands(page)}
    nodes = [line[1:] for line in lines if line[0] == "bin/echo-node" and role in line]
    assert nodes
    for words in nodes:
        arguments = parsers.node_parser().parse_args(words)
        sets = [text for text in arguments.set if text != "engine.kind=vllm"]
        config = load_config(
            ROOT / arguments.config, [*sets, f"model.name={tiny_model_dir}"], arguments.role
        )
        text = dry_run(config, arguments.role)
        assert f"would start: a {role}" in text
        assert "not known here" not in text


def test_exit_codes_are_those_of_the_commands() -> None:
    [table] = re.findall(r"^## Exit codes\n(.*?)^## ", text_of(DOCS / "operations.md"), re.M | re.S)
    told = {
        int(code)
        for cell in re.findall(r"^\| ([\d, ]+) \|", table, re.M)
        for code in cell.split(",")
    }
    assert told == {int(code) for code in re.findall(r"\b\d+\b", parsers.EXIT_CODES_HELP)}


def test_the_records_of_the_ledger_are_those_of_the_code() -> None:
    section = text_of(DOCS / "operations.md").partition("## The ledger")[2]
    rows = [row.split("|")[1:3] for row in re.findall(r"^\| `.*", section, re.M)]
    told = {kind: spans(fields) for kinds, fields in rows for kind in spans(kinds)}
    written = {str(kind.__struct_config__.tag): kind for kind in Record.__subclasses__()}
    assert told.keys() - {"kind"} == written.keys()
    for kind, fields in told.items():
        if fields:
            assert {*fields, "at"} == {*written[kind].__struct_fields__}, kind


# --- messages -------------------------------------------------------------------------------------


@cache
def texts_in_code() -> str:
    """Return every text in echo/ and in bin/echo-setup, with a gap for what is inserted.

    Docstrings reach nobody who runs it.
    """
    texts = [(ROOT / "bin" / "echo-setup").read_text(encoding="utf-8")]
    for path in (ROOT / "echo").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if id(node) in docstrings:
                continue
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        getattr(part, "value", "") if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


@pytest.mark.slow
def test_every_message_that_it_explains_is_one_of_ours() -> None:
    rows = re.findall(r"^\| `(.+?)` \|", text_of(DOCS / "troubleshooting.md"), re.M)
    messages = [row for row in rows if " " in row and "`" not in row]
    assert len(messages) > 40
    parts = {part.strip(" ;:.") for message in messages for part in message.split("…")}
    assert [part for part in sorted(parts) if part not in texts_in_code()] == []


@pytest.mark.slow
def test_every_key_that_a_message_names_exists() -> None:
    others = {"learner.key", "learner.rank", "task.code"}  # a file, a log, a setting of the wire's
    others |= {"task.completed", "task.description", "task.total"}  # of a bar of rich's
    others |= {name for _, name, _ in translations()}
    files = re.compile(r".*\.(json|jsonl|log|png|safetensors|toml|txt)")
    pattern = rf"(?<![\w./])(?:{'|'.join(sections())}|job|sim)(?:\.[a-z_0-9]+)+"
    keys = {key for key in re.findall(pattern, texts_in_code()) if not files.fullmatch(key)}
    assert len(keys) > 90
    assert sorted(key for key in keys - others if not is_key(key)) == []


def test_the_reasons_that_it_explains_are_those_that_there_are() -> None:
    page = text_of(DOCS / "troubleshooting.md").partition("## Refused and discarded")[2]
    rows = re.findall(r"^\| (`.*?`) \| ", page, re.M)
    explained = [reason for row in rows for reason in spans(row)]
    of_nodes = {"digest_mismatch", "name_taken", "protocol_version", "too_many_nodes"}
    assert set(explained) - of_nodes - {"duplicates"} == REASONS
    assert len(explained) == len(set(explained))


def test_the_metrics_name_every_reason_why_a_group_is_left_out() -> None:
    reasons = re.findall(r"^    (\w+)  +", batch.__doc__ or "", re.M)
    left_out = reasons[reasons.index("bad_support") + 1 :]
    said = spans(metrics_page.MEANINGS["Groups"]["groups/dropped/*"])
    assert sorted(said) == sorted([*left_out, "no_opinion"])


def test_every_reason_is_given_somewhere() -> None:
    [table] = re.findall(r"^REASONS = frozenset\((.*?)^\)", source_of("REASONS = "), re.M | re.S)
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "echo").rglob("*.py")]
    rest = "\n".join(sources).replace(table, "")
    assert [reason for reason in sorted(REASONS) if f'"{reason}"' not in rest] == []


def test_the_messages_of_the_protocol_are_those_of_the_code() -> None:
    classes: set[str] = set()
    for text in (path.read_text(encoding="utf-8") for path in (ROOT / "echo").rglob("*.py")):
        classes |= set(re.findall(r"^class (\w+)\(Message, frozen=True\):", text, re.M))
    rows = re.findall(r"^\| [\w ]+ \| [\w ]+ \| (`.*`) \|$", text_of(DOCS / "protocol.md"), re.M)
    assert {name for row in rows for name in spans(row)} == classes


def source_of(text: str) -> str:
    """Return the module of echo/ that has this text at the beginning of a line."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "echo").rglob("*.py"))
    [found] = [source for source in sources if f"\n{text}" in source]
    return found


# --- Python ---------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Save the Python examples of the pages under the names that they are given; go there."""
    modules = set()
    for page in PAGES:
        for name, code in files_of(page).items() if page != FIRST_RUN else ():
            (tmp_path / name).write_text(code, encoding="utf-8")
            modules.add(Path(name).stem)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name in modules or name.startswith("echo_user_")]:
        del sys.modules[name]


def test_every_example_is_one_that_is_run(saved: Path) -> None:
    # tests/e2e/test_first_real_run.py runs what that page has.
    examples = [code for page in PAGES if page != FIRST_RUN for code in blocks(page, "python")]
    run = {path.read_text(encoding="utf-8") for path in saved.glob("*.py")}
    elsewhere = [code for code in examples if code not in run]
    assert len(run) == 6
    assert len(elsewhere) == 1
    assert "OpenAI" in elsewhere[0], "tests/runtime/test_agent_http.py runs this one"


def test_its_task_works(saved: Path) -> None:
    task = load_task("my_task:Reverse", {})
    example = task.example(3, split="train")
    assert task.reward(example, f" {example.answer}\n") == 1
    assert task.reward(example, str(example.answer)[1:]) == 0


def test_its_environment_works(saved: Path) -> None:
    task = load_task("second_try:SecondTry", {})
    assert isinstance(task, Environment)
    example = task.example(3, split="train")
    state = task.begin(example)
    assert task.reply(state, "1>0") == example.prompt
    assert task.reply(state, f">{example.answer}") is None
    assert task.outcome(state) == 0.5


def test_its_reward_function_works(saved: Path) -> None:
    [table] = [text for text in blocks(DOCS / "tasks.md", "toml") if '"dataset"' in text]
    section = tomllib.loads(table)["task"]
    task = load_task(section["kind"], section["options"])
    example = Example(index=0, split="train", prompt="?", answer="42", columns={"level": 1})
    assert task.reward(example, "It is 42.") == 1
    assert task.reward(example, "It is 43.") == 0


def test_both_forms_of_a_reward_function_work(saved: Path) -> None:
    example = Example(index=0, split="train", prompt="?", answer="42")
    one = load_task("dataset", {"reward": "forms.py:correct"})
    assert [one.reward(example, text) for text in (" 42\n", "41")] == [1.0, 0.0]
    group = load_task("dataset", {"reward": "forms.py:shortest"})
    assert group.compares_answers(example)
    assert group.rewards(example, ["42", "forty-two"]) == [1.0, 0.0]


@pytest.mark.slow
def test_its_program_of_two_adapters_works(saved: Path, tiny_model_dir: Path) -> None:
    from tests.train.test_trainer import equal, make_groups

    sys.path.insert(0, str(saved))
    train = importlib.import_module("two_adapters").train
    (saved / "state").mkdir()
    fresh = train(tiny_model_dir, [], saved / "state")
    batches = [("default", make_groups()), ("code", make_groups()), ("code", make_groups(seed=1))]
    trained = train(tiny_model_dir, batches, saved / "state")
    for name, num_steps in (("default", 1), ("code", 2)):
        for trainer in (trained, fresh):
            trainer.adapters.use(name)
        assert trained.step_count == num_steps
        assert not equal(trained.snapshot(), fresh.snapshot())
    fresh.load_state(saved / "state")
    assert equal(trained.snapshot(), fresh.snapshot())


@pytest.mark.slow
def test_its_loss_works(saved: Path) -> None:
    import torch

    from echo.algo.loss import LossInputs
    from echo.train.custom_loss import load_loss

    [table] = blocks(DOCS / "old-rollouts.md", "toml")
    section = tomllib.loads(table)["loss"]
    loss = load_loss(section["kind"], section["options"])
    learner = torch.tensor([[-1.0, -1.0], [-1.0, -1.0]], requires_grad=True)
    output = loss(
        LossInputs(
            learner_logprobs=learner,
            sampler_logprobs=torch.tensor([[-1.0, -9.0], [-1.0, -1.0]]),
            advantages=torch.tensor([1.0, -1.0]),
            completion_mask=torch.tensor([[True, True], [True, False]]),
            num_tokens=3,
            num_rollouts=2,
        )
    )
    output.loss.backward()
    assert learner.grad is not None
    # Weights 1, 3 (capped) and 1 times minus the advantage, over the tokens of the batch.
    torch.testing.assert_close(learner.grad * 3, torch.tensor([[-1.0, -3.0], [1.0, 0.0]]))
    assert output.token_counts["clip_ratio/high"] == 1
