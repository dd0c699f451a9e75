"""The command line and the configuration, up to the point where the trainer takes over."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from memtrain.__main__ import main
from memtrain.command_line import compose_jobs
from memtrain.config import CONFIGS, recipes, settings
from memtrain.job import AdamW, Approximation, Constant, Cosine
from memtrain.plan import POLICIES, ChunkedLogits, Keep, Recompute
from memtrain.schema import ALTERNATIVES, PlanSchema
from memtrain.settings import Settings

MINE = """
# A recipe of the user's.
model: llama_5m
budget: 1GiB
steps: 20
global_batch_size: 4
data: {sequence_length: 64, tokenizer: {train_vocab_size: 300}}
schedule: {name: cosine, warmup_steps: 2, final_fraction: 0.5}
plan:
  activations: {policy: recompute, every: 2}
  loss: chunked_logits
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Settings, str]]:
    """What the command line hands to the trainer, whose place a list takes."""
    calls: list[tuple[Settings, str]] = []
    trainer = types.ModuleType("memtrain.recipe")
    trainer.run_recipe = lambda job, config_yaml: calls.append((job, config_yaml))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memtrain.recipe", trainer)
    return calls


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the recipe ``mine.yaml`` in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path


def one(*overrides: str) -> Settings:
    (cfg,) = compose_jobs(overrides, multirun=False)
    return settings(cfg)


def test_without_arguments_the_quickstart_runs(ran: list[tuple[Settings, str]]) -> None:
    assert main([]) == 0
    ((job, config_yaml),) = ran
    assert (job.recipe, job.mode, job.budget_bytes, job.headroom_bytes) == ("quickstart", "train", 256 * 2**20, 0)
    assert (job.global_batch_size, job.steps, job.epochs, job.seed, job.max_grad_norm) == (8, 120, None, 0, 1.0)
    assert job.optimizer == AdamW(learning_rate=2e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    assert job.schedule == Cosine(warmup_steps=10, final_fraction=0.1)
    assert job.model.config is not None
    assert job.model.config["architectures"] == ["LlamaForCausalLM"]
    data = job.data
    assert (data.source, data.options.sequence_length, data.tokenizer.train_vocab_size) == ("python_docs", 256, 4096)
    assert (job.device["name"], job.device.get("threads"), job.constraints) == ("cpu", None, {})
    assert job.run_dir.parent == Path("runs/quickstart")
    assert yaml.safe_load(config_yaml)["schedule"] == {"name": "cosine", "warmup_steps": 10, "final_fraction": 0.1}


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_a_valid_configuration_and_says_what_it_is(name: str) -> None:
    assert one(f"recipe={name}", "mode=plan").recipe == name
    assert recipes()[name]


@pytest.mark.parametrize("name", ALTERNATIVES["optimizer"].classes)
def test_an_optimizer_is_chosen_by_name_and_keeps_what_the_recipe_sets_for_every_rule(name: str) -> None:
    chosen = one(f"optimizer={name}", "optimizer.learning_rate=3e-4").optimizer
    assert type(chosen) is ALTERNATIVES["optimizer"].classes[name]
    assert (chosen.learning_rate, chosen.weight_decay) == (3e-4, 0.1)


def test_a_table_of_optimizers_needs_neither_text_nor_budget_nor_a_tokenizer() -> None:
    assert one("mode=optimizers", "model=llama2_7b", "data=none", "budget=null").mode == "optimizers"


def test_the_schema_and_the_defaults_list_know_every_policy_field() -> None:
    assert {key.name for key in dataclasses.fields(PlanSchema)} == {"micro_batch_size", *POLICIES}
    defaults = yaml.safe_load((CONFIGS / "run.yaml").read_text())["defaults"]
    assert ALTERNATIVES.keys() <= {group for entry in defaults if isinstance(entry, dict) for group in entry}


@pytest.mark.parametrize("folder", ["model", "data", "device"])
def test_each_file_of_a_group_can_be_chosen(folder: str) -> None:
    for file in (CONFIGS / folder).glob("*.yaml"):
        assert len(compose_jobs([f"{folder}={file.stem}"], multirun=False)) == 1


@pytest.mark.parametrize(
    ("overrides", "constraints"),
    [
        (["plan.activations=recompute", "plan.activations.every=2"], {"activations": Recompute(every=2)}),
        (["plan/activations=recompute"], {"activations": Recompute()}),
        (["plan.activations.policy=keep", "plan.micro_batch_size=4"], {"activations": Keep(), "micro_batch_size": 4}),
        (["plan.activations={policy: recompute, every: 3}"], {"activations": Recompute(every=3)}),
        (["plan.activations=auto"], {}),
        (["plan.activations=null"], {}),
    ],
)
def test_a_policy_is_chosen_as_typed(overrides: list[str], constraints: dict[str, object]) -> None:
    assert one(*overrides).constraints == constraints


@pytest.mark.parametrize("group", POLICIES)
def test_every_policy_can_be_chosen(group: str) -> None:
    for option, policy in ALTERNATIVES[f"plan/{group}"].classes.items():
        expected = {} if option == "auto" else {group: policy()}
        # An update during backward rules out clipping, whatever the recipe says; where state can lie is said by the device.
        # What runs in 16 bits only asks for them.
        precision = "autocast_bf16" if option == "flash_attention" else "fp32"
        given = ["max_grad_norm=null", f"allow=[{','.join(Approximation)}]", "device=l4", f"precision={precision}"]
        assert one(f"plan.{group}={option}", *given).constraints == expected


def test_another_option_keeps_what_it_shares_with_the_one_of_the_recipe() -> None:
    assert one("schedule=constant").schedule == Constant(warmup_steps=10)


def test_a_model_configuration_is_free_form() -> None:
    config = one("model.config.rope_theta=1e4", "+model.config.rope.type=linear", "~model.config.architectures").model.config
    assert config is not None
    assert (config["rope_theta"], config["rope"]) == (1e4, {"type": "linear"})
    assert "architectures" not in config


def test_a_model_and_a_text_of_the_user_replace_those_of_the_recipe() -> None:
    job = one("model=pretrained", "model.path=./llama", "data.tokenizer.train_vocab_size=null", "data.path=book.txt")
    assert (job.model.path, job.model.config) == ("./llama", None)
    assert (job.data.source, job.data.path, job.data.options.sequence_length) == (None, ("book.txt",), 256)


def test_a_recipe_of_the_user_is_a_path(mine: Path) -> None:
    job = one("recipe=./mine.yaml", "steps=30")
    assert (job.recipe, job.steps, job.schedule) == ("mine", 30, Cosine(warmup_steps=2, final_fraction=0.5))
    assert job.constraints == {"activations": Recompute(every=2), "loss": ChunkedLogits()}
    assert one(f"recipe={mine}/mine.yaml").recipe == "mine"


def test_a_file_named_like_a_recipe_does_not_replace_it(mine: Path) -> None:
    (mine / "quickstart.yaml").write_text(MINE)
    assert one("recipe=./quickstart.yaml").steps == 20
    assert one("recipe=quickstart").steps == 120


def test_the_command_line_chooses_over_the_body_of_a_recipe(mine: Path) -> None:
    job = one("recipe=mine.yaml", "plan.activations=keep", "schedule=constant")
    assert job.constraints == {"activations": Keep(), "loss": ChunkedLogits()}
    assert job.schedule == Constant(warmup_steps=2)


def test_a_saved_configuration_is_a_recipe(mine: Path, ran: list[tuple[Settings, str]]) -> None:
    assert main(["recipe=mine.yaml", "run.dir=first"]) == 0
    (mine / "saved.yaml").write_text(ran[0][1])
    assert main(["recipe=saved.yaml"]) == 0
    assert dataclasses.replace(ran[1][0], recipe="mine") == ran[0][0]


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sequence_lenght=8", "there is no key 'sequence_lenght': did you mean data.sequence_length?"),
        ("optimizer.learningrate=1e-3", "there is no key 'optimizer.learningrate': did you mean optimizer.learning_rate?"),
        ("modle=llama_5m", "there is no key 'modle': did you mean mode or model?"),
        ("+stepz=3", "there is no key 'stepz': did you mean steps?"),
        (
            "optimizer.lr=1",
            "there is no key 'optimizer.lr': optimizer has learning_rate, betas, eps, weight_decay, momentum, "
            "beta2_decay, min_scale, clip_threshold.",
        ),
        ("xyzzy=1", "there is no key 'xyzzy': python -m memtrain --help lists the keys."),
        ("recipe=quikstart", "there is no recipe 'quikstart': did you mean quickstart?"),
        ("recipe=./mien.yaml", "there is no recipe file ./mien.yaml: did you mean mine.yaml?"),
        ("recipe=./zzz.yml", "there is no recipe file ./zzz.yml: give the path of a YAML file, or the name of a recipe."),
        (
            "model=lama_5m",
            "model is 'lama_5m', and it must be one of llama2_7b, llama3_1b, llama3_8b, llama_5m, pretrained, smollm2.",
        ),
        ("model=null", "model is null, and it must be one of llama2_7b, llama3_1b, llama3_8b, llama_5m, pretrained, smollm2."),
        ("plan=keep", "plan is 'keep', and it must be set key by key, as in plan.KEY=VALUE."),
        (
            "plan.activations=recomput",
            "plan.activations is 'recomput', and it must be one of auto, keep, recompute, recompute_first,",
        ),
        (
            "plan.activations.every=2",
            "plan.activations.every is a setting of plan.activations=recompute, which is not chosen here: choose it as well.",
        ),
        (
            "plan.activations={policy: recompute, evry: 2}",
            "there is no key 'plan.activations.evry': did you mean plan.activations.every",
        ),
        ("plan.loss=[a]", "plan.loss is ['a'], and it must be one of auto, whole_logits, chunked_logits."),
        ("optimizer=null", "optimizer is null, and it must be one of adamw, adam, sgd, adafactor, lion, muon."),
        ("global_batch_size=abc", "global_batch_size is 'abc', and it must be a whole number."),
        ("optimizer.eps=abc", "optimizer.eps is 'abc', and it must be a number."),
        ("seed=null", "seed is null, and it needs a value."),
        ("model.config=3", "model.config: Cannot assign int to Dict[str, Any]."),
        ("run.dir=${nowhere}", "run.dir: Interpolation key 'nowhere' not found."),
        ("budget", "'budget' cannot be read: write key=value, and quote a value that has special characters."),
        (
            "budget=1GiB,2GiB",
            "budget=1GiB,2GiB names several jobs: add -m to run them all, write a list as [a,b], or quote one",
        ),
        ("~steps", "~steps would delete a key that memtrain reads: set it, as in steps=null."),
        ("hydra.run.dir=x", "hydra.run.dir=x has no effect here: memtrain runs its jobs itself and writes only into run.dir."),
        ("budget=24", "budget: '24' is not an amount of memory: give a positive number of bytes with its unit"),
        ("budget=-1GiB", "budget: '-1GiB' is not an amount of memory: give a positive number of bytes with its unit"),
        ("budget=24Gbit", "budget: '24Gbit' names bits, and memory is counted in bytes: give"),
        ("headroom=1", "headroom: '1' is not an amount of memory: give"),
        ("mode=trian", "mode is 'trian', and it must be one of train, plan, data, optimizers."),
        ("seed=-1", "seed is -1, and it must be a whole number from 0 to 4294967295."),
        ("steps=null", "neither steps nor epochs is set: set one of them to say how long the run is."),
        ("evaluate_every=0", "evaluate_every is 0, and it must be 1 or more, or null."),
        ("model.path=x", "data.tokenizer.train_vocab_size is 4096, and the weights at model.path know only"),
        ("model.config=null", "neither model.path nor model.config is set: write model.path=PATH or choose a model=NAME."),
        ("model.config.model_type=null", "model.config has no model_type"),
        ("data.source=wiki", "data.source is 'wiki', and it must be one of python_docs, stdlib_docstrings."),
        ("data={source: stdlib_docstrings, eval_path: x}", "data.eval_path is x, and data.source stdlib_docstrings holds out"),
        ("data.path=x", "data.path is 'x', and it must be a file or folder that exists, a pattern, or hub:NAME."),
        ("data.sequence_length=1", "data.sequence_length is 1, and it must be 2 or more tokens."),
        ("data.held_out=1", "data.held_out is 1.0, and it must be from 0 (evaluate on nothing) to 0.5."),
        ("data.tokenizer.train_vocab_size=100", "data.tokenizer.train_vocab_size is 100, and it must be 259 or more, or null."),
        (
            "data.tokenizer.path=x",
            "data.tokenizer.path and data.tokenizer.train_vocab_size are both set: set one of them to null.",
        ),
        ("data.tokenizer.train_vocab_size=null", "a model built from model.config brings no tokenizer: set"),
        ("model={path: x, config: null}", "data.tokenizer.train_vocab_size is 4096, and the weights at model.path know only"),
        ("device.threads=0", "device cpu: threads is 0, and it must be above 0."),
        ("plan.micro_batch_size=0", "plan.micro_batch_size is 0, and it must be 1 or more, or null."),
        ("optimizer.betas=[0.9]", "betas is (0.9,), and it must be two numbers"),
        ("schedule.warmup_steps=-1", "warmup_steps is -1, and it must be a whole number of 0 or more."),
    ],
)
def test_a_mistake_is_one_sentence(
    override: str, sentence: str, mine: Path, ran: list[tuple[Settings, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([override]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"memtrain: {sentence}")
    assert (printed.err.count("\n"), printed.out, ran) == (1, "", [])


def test_a_length_given_here_takes_the_place_of_the_recipes() -> None:
    assert (one("epochs=2").steps, one("epochs=2").epochs) == (None, 2)
    assert (one("steps=3").steps, one("steps=3").epochs) == (3, None)
    with pytest.raises(ValueError, match="steps and epochs are both set, and only one can hold: set the other to null"):
        one("epochs=2", "steps=3")


def test_text_that_is_not_there_is_refused_before_torch_is_loaded(
    ran: list[tuple[Settings, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data.path=nowhere.txt"]) == 2
    refused = "memtrain: data.path is 'nowhere.txt', and it must be a file or folder that exists, a pattern, or hub:NAME.\n"
    assert capsys.readouterr().err == refused
    assert ran == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz: 3", "there is no key 'stepz': did you mean steps?"),
        ("steps: x", "steps is 'x', and it must be a whole number."),
        ("plan: 3", "Merge error: int is not a subclass of PlanSchema"),
        ("schedule: cosin", "schedule is 'cosin', and it must be one of constant, cosine, linear."),
        ("schedule: {final_fracton: 1}", "there is no key 'schedule.final_fracton': did you mean schedule.final_fraction?"),
        ("defaults: [override /modl: x]", "Could not override 'modl'. No match in the defaults list."),
        (
            "model: llama_5m\ndefaults: 3",
            "has defaults that are not a list: write one line '- override /GROUP: NAME' for each.",
        ),
        ("- steps", "holds a list, and a recipe must hold keys with values."),
        ("model.path: x", "has the key 'model.path', which only the command line takes: write path below model."),
        ("a: [\nb: 3", "broken.yaml, line 2 is not valid YAML: "),
        ("", "data.sequence_length has no value: set data.sequence_length=VALUE on the command line or in the recipe."),
    ],
)
def test_a_mistake_in_a_recipe_is_one_sentence(
    text: str, sentence: str, mine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (mine / "broken.yaml").write_text(text)
    assert main(["recipe=broken.yaml"]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


def test_a_multirun_runs_every_combination_in_its_own_folder(mine: Path, ran: list[tuple[Settings, str]]) -> None:
    assert main(["-m", "recipe=mine.yaml,quickstart", "budget=1GiB,2GiB", "run.dir=out"]) == 0
    assert [(job.recipe, job.budget_bytes >> 30, str(job.run_dir)) for job, _ in ran] == [
        ("mine", 1, "out/0"),
        ("mine", 2, "out/1"),
        ("quickstart", 1, "out/2"),
        ("quickstart", 2, "out/3"),
    ]


def test_a_multirun_sweeps_policies_and_ranges(ran: list[tuple[Settings, str]]) -> None:
    assert main(["--multirun", "plan.activations=keep,recompute", "steps=range(20,22)"]) == 0
    assert [(job.constraints["activations"], job.steps) for job, _ in ran] == [
        (Keep(), 20),
        (Keep(), 21),
        (Recompute(), 20),
        (Recompute(), 21),
    ]
    assert len({job.run_dir for job, _ in ran}) == 4


def test_no_job_starts_when_one_is_wrong(ran: list[tuple[Settings, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "budget=1GiB,2Gbit"]) == 2
    assert "'2Gbit' names bits" in capsys.readouterr().err
    assert ran == []


def test_an_interval_is_not_swept(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "seed=interval(0,1)"]) == 2
    assert "seed=interval(0,1) is an interval, and jobs need single values" in capsys.readouterr().err


def test_a_failed_job_leaves_the_others_running(
    monkeypatch: pytest.MonkeyPatch, ran: list[tuple[Settings, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def run_recipe(job: Settings, config_yaml: str) -> None:
        if job.budget_bytes < 2**30:
            raise ValueError("no plan fits.")
        ran.append((job, config_yaml))

    monkeypatch.setattr(sys.modules["memtrain.recipe"], "run_recipe", run_recipe)
    assert main(["-m", "budget=1MiB,1GiB"]) == 1
    assert [job.budget_bytes for job, _ in ran] == [2**30]
    assert capsys.readouterr().err == "memtrain: job 0: no plan fits.\n"
    assert main(["budget=1MiB"]) == 1
    assert capsys.readouterr().err == "memtrain: no plan fits.\n"


def test_an_interrupt_ends_with_its_exit_code(monkeypatch: pytest.MonkeyPatch, ran: list[tuple[Settings, str]]) -> None:
    def run_recipe(job: Settings, config_yaml: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["memtrain.recipe"], "run_recipe", run_recipe)
    assert main(["-m", "seed=1,2"]) == 130


def test_help_names_recipes_keys_options_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    # As one line, since what is long is wrapped at the terminal's width.
    text = " ".join(capsys.readouterr().out.split())
    for name, line in recipes().items():
        assert name in text
        assert line in text
    for part in (
        "budget=",
        "data.sequence_length=",
        "auto | keep | recompute (every) | recompute_first (blocks) | recompute_selective | recompute_attention | recompute_mlp",
        "python -m memtrain recipe=./mine.yaml",
    ):
        assert part in text


def test_cfg_prints_the_composed_configuration_and_runs_nothing(
    ran: list[tuple[Settings, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["seed=3", "--cfg", "job", "budget=1GiB"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["recipe"], printed["seed"], printed["budget"]) == ("quickstart", 3, "1GiB")
    assert printed["plan"]["activations"] == {"policy": "auto"}
    assert ran == []


def test_nothing_but_the_trainer_writes_into_the_working_directory(mine: Path, ran: list[tuple[Settings, str]]) -> None:
    before = os.getcwd()
    assert main(["-m", "seed=1,2"]) == 0
    assert [path.name for path in mine.iterdir()] == ["mine.yaml"]
    assert os.getcwd() == before


def test_the_module_runs_from_any_folder(tmp_path: Path) -> None:
    package = Path(sys.modules["memtrain"].__path__[0]).parent
    command = [sys.executable, "-W", "error", "-m", "memtrain", "recipe=quikstart"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(package)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "memtrain: there is no recipe 'quikstart': did you mean quickstart?\n"
