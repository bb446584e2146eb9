"""Loading: strict, left to right, with the path in every error."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config import Config
from streamrl.config.data import DataConfig
from streamrl.config.load import dump, load, resolve
from streamrl.config.rollout import ModelConfig
from streamrl.config.run import RunConfig
from streamrl.config.yaml_text import from_text, to_text
from streamrl.errors import ConfigError

BASE = ["model.path=m", "data.train_files=train.parquet"]
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_files_merge_deeply_left_to_right_and_overrides_come_last(tmp_path):
    first = write(tmp_path, "first.yaml", "model: {path: m}\ndata: {train_files: a}\nactor:\n  optim: {lr: 1e-5, weight_decay: 0.5}\nrollout: {n: 4}\n")
    second = write(tmp_path, "second.yaml", "actor:\n  optim: {lr: 1e-6}\nrollout: {n: 8}\n")
    config = load([first, second], ["rollout.n=2"])
    assert (config.actor.optim.lr, config.actor.optim.weight_decay, config.rollout.n) == (1e-6, 0.5, 2)


def test_lists_are_replaced_not_merged(tmp_path):
    path = write(tmp_path, "a.yaml", "model: {path: m}\ndata: {train_files: [a, b]}\n")
    assert load([path], ["data.train_files=[c]"]).data.train_files == ["c"]


def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path):
    path = write(tmp_path, "a.yaml", "model: {path: m}\ndata: {train_files: a}\nactor:\n  optim:\n    # lr: 1\nreplay:\n")
    assert load([path]) == load([], ["model.path=m", "data.train_files=a"])
    assert load([path, write(tmp_path, "b.yaml", "actor: {optim: {lr: 2.0}}"), path]).actor.optim.lr == 2.0


@pytest.mark.parametrize(("text", "value"), [("1e-6", 1e-6), ("1E-6", 1e-6), ("2", 2.0), (".5", 0.5), ("3.0e-4", 3e-4)])
def test_numbers_are_read_as_people_write_them(text, value):
    assert load([], [*BASE, f"actor.optim.lr={text}"]).actor.optim.lr == value


def test_text_keys_take_the_text_as_it_stands():
    config = load([], [*BASE, "run.name=007", "cluster.env.FOO=1", "cluster.env.BAR=on", "rollout.agent.default_agent_loop=5"])
    assert config.run.name == "007" and config.cluster.env == {"FOO": "1", "BAR": "on"}
    assert config.rollout.agent.default_agent_loop == "5"
    assert load([], [*BASE, "cluster.address=null"]).cluster.address is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learnig_rate=1", "$.learnig_rate: a section of the configuration has no key 'learnig_rate'"),
        ("actor.optim.learnig_rate=1", "did you mean $.actor.optim.lr?"),
        ("actor.optim.weight_decy=1", "did you mean $.actor.optim.weight_decay?"),
        ("traner.test_freq=1", "did you mean $.trainer?"),
        ("actor.lr=1", "this key belongs to $.actor.optim.lr"),
        ("trainer.max_staleness=1", "this key belongs to $.replay.max_staleness"),
        ("data.train-batch-size=1", "write $.data.train_batch_size, keys have underscores"),
        ("+actor.x=1", "write $.actor, overrides take no prefix"),
        ("+new.key=1", "has no key '+new'"),
        ("reward.custom_reward_function.pth=x", "did you mean $.reward.custom_reward_function.path?"),
        ("rollout.vllm.zzz=1", "valid keys are cpu_kvcache_gib"),
        ("rollout.num_generations=8", "this key belongs to $.rollout.n"),
    ],
)
def test_unknown_keys_fail_with_section_and_nearest_name(override, said):
    with pytest.raises(ConfigError) as error:
        load([], [*BASE, override])
    assert said in str(error.value) and f"(override {override!r})" in str(error.value)


def test_unknown_keys_in_a_file_name_the_file(tmp_path):
    path = write(tmp_path, "my run.yaml", "model: {path: m}\ndata: {train_file: a}\n")
    with pytest.raises(ConfigError, match=r"\$\.data\.train_file: .*my run\.yaml.*did you mean \$\.data\.train_files"):
        load([path])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.optim.lr=fast", "$.actor.optim.lr: expected `float`, got `str`, the value is 'fast'"),
        ("rollout.n=2.5", "$.rollout.n: expected `int`, got `float`"),
        ("rollout.n=0", "$.rollout.n: expected `int` >= 1, the value is 0"),
        ("rollout.n=null", "$.rollout.n: expected `int`, got `null`"),
        ("rollout.n=true", "$.rollout.n: expected `int`, got `bool`"),
        ("rollout.engine=vlm", "$.rollout.engine: one of transformers, vllm, scripted is required, got 'vlm'"),
        ("actor.optim.betas=[0.9]", "$.actor.optim.betas"),
        ("actor.optim.lr=.nan", "$.actor.optim.lr: a number must be finite"),
        ("run.seed=99999999999999999999", "$.run.seed: a whole number has at most 64 bits"),
        ("replay.wait_s=1e12", "$.replay.wait_s: expected `float` <= 1000000000.0"),
        ("model.path=", "$.model.path: expected `str`, got `null`, the value is None; correct this value"),
        ("data.apply_chat_template_kwargs={1: a}", "$.data.apply_chat_template_kwargs: the keys of this mapping must be text"),
        ("actor=3", "$.actor: expected `object`, got `int`"),
        ("data.train_files=[a, 3]", "$.data.train_files[1]: expected `str`, got `int`, the value is 3; put the value in quotes"),
        ("trainer.val_before_train=yes", "$.trainer.val_before_train: expected `bool`, got `str`"),
    ],
)
def test_wrong_values_fail_with_path_rule_and_value(override, said):
    with pytest.raises(ConfigError) as error:
        load([], [*BASE, override])
    assert said in str(error.value)


@pytest.mark.parametrize("words", [["data.train_files=a"], ["data.train_files=a", "model.trust_remote_code=true"]])
def test_a_missing_value_is_named(words):
    with pytest.raises(ConfigError, match=r"\$\.model\.path: this key is required.*model\.path=\.\.\."):
        load([], words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1, 2", "must be YAML"),
        ("- a\n- b\n", "must hold a mapping"),
        ("run: {name: a, name: b}", "'name' is given twice"),
        ("run: {1: a}", "no key 1"),
        ("{[a]: 1}", "a key is plain text"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_files_that_are_no_configuration_fail_with_their_name(tmp_path, text, said):
    path = write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigError) as error:
        load([path])
    assert said in str(error.value) and "bad.yaml" in str(error.value)


def test_a_missing_file_and_a_malformed_override_say_what_to_do():
    with pytest.raises(ConfigError, match=r"no_such\.yaml"):
        load(["no_such.yaml"])
    with pytest.raises(ConfigError, match=r"write rollout\.n=\.\.\. in one word"):
        load(["rollout.n"])
    for text in ("rollout.n", "=3", "rollout..n=3"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            load([], [text])
    for text in ("rollout=", "actor.optim=null"):
        with pytest.raises(ConfigError, match=r"names the whole section; write for example (rollout|actor\.optim)\."):
            load([], [text])


plain = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
tricky = st.sampled_from(
    ["1e-6", "on", "yes", "1:30", "0x1f", "~", "null", "", "<<", "2024-01-01", "1_000", "010", ".5", "- a", "a: b", "#x", " s ", "${streamrl}/x", "é"]
)


@given(st.recursive(plain | tricky, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3), max_leaves=8))
def test_yaml_text_reads_back_equal(value):
    assert from_text(to_text(value), "test") == value


@given(st.floats(1e-12, 1e3), tricky, st.dictionaries(tricky.filter(bool), tricky, max_size=3))
def test_a_dumped_configuration_loads_back_equal(tmp_path_factory, lr, name, kwargs):
    config = load([], [*BASE, f"actor.optim.lr={lr!r}"])
    config = msgspec.structs.replace(config, run=RunConfig(name=name), data=DataConfig(train_files=[name], apply_chat_template_kwargs=dict(kwargs)))
    path = write(tmp_path_factory.mktemp("dump"), "config.yaml", dump(config))
    assert load([path]) == config


def test_resolving_leaves_nothing_open_and_twice_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = resolve(load([], ["model.path=owner/name", "data.train_files=d/tr ain.jsonl", "data.val_files=${streamrl}/v.parquet", "rollout.n=8"]))
    assert config.model.path == config.model.tokenizer_path == "owner/name"
    assert config.data.train_files == [str(tmp_path / "d/tr ain.jsonl")]
    assert config.data.val_files[0].endswith("/streamrl/v.parquet") and Path(config.data.val_files[0]).is_absolute()
    assert config.run.seed is not None and config.data.seed == config.run.seed
    assert Path(config.run.folder).parent == tmp_path / "runs" and Path(config.run.folder).name.startswith("run-")
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.2)
    assert (config.replay.min_sessions, config.algorithm.min_group_size, config.weights.max_unavailable) == (2, 2, 1)
    assert config.weights.probe_tolerance == 0.5 and config.rollout.agent.default_agent_loop == "single_turn_agent"
    assert resolve(config) == config


def test_resolving_says_what_the_open_data_keys_mean_and_makes_their_paths_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = resolve(load([], BASE)).data
    assert plain.gen_batch_size == 1 and plain.cache_dir == str(Path("~/.cache/streamrl/data").expanduser()) and plain.custom_cls is None
    words = ["data.tool_config_path=tools.yaml", "data.custom_cls.path=mine.py", "data.custom_cls.name=Mine", "data.cache_dir=cache"]
    data = resolve(load([], [*BASE, *words])).data
    assert [data.tool_config_path, data.custom_cls.path, data.cache_dir] == [str(tmp_path / name) for name in ("tools.yaml", "mine.py", "cache")]


def test_what_is_given_is_not_replaced():
    words = ["run.seed=0", "data.seed=0", "actor.clip_ratio_low=0.1", "rollout.n=1", "weights.probe_tolerance=0.25", "run.folder=/r"]
    config = resolve(load([], [*BASE, *words]))
    assert (config.run.seed, config.data.seed, config.actor.clip_ratio_low, config.replay.min_sessions) == (0, 0, 0.1, 1)
    assert (config.weights.probe_tolerance, config.run.folder) == (0.25, "/r")


def test_the_defaults_are_the_ones_users_of_verl_expect():
    config = Config(model=ModelConfig(path="m"), data=DataConfig())
    assert (config.rollout.n, config.data.max_prompt_length, config.data.max_response_length) == (1, 512, 512)
    assert (config.actor.ppo_mini_batch_size, config.actor.ppo_epochs, config.actor.ppo_micro_batch_size_per_gpu) == (256, 1, None)
    assert (config.actor.use_dynamic_bsz, config.actor.ppo_max_token_len_per_gpu) == (False, 16384)
    assert (config.replay.max_staleness, config.trainer.parameter_sync_step) == (1, 1)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_configuration_loads_checks_and_saves(path, tmp_path):
    from streamrl.config.checks import check
    from streamrl.config.plan import plan

    config = load([path])
    assert check(config) == []
    resolved = resolve(config)
    saved = write(tmp_path, "config.yaml", dump(resolved))
    assert load([saved]) == resolved
    assert "training steps" in plan(resolved)


def test_configurations_are_shipped():
    assert {"tiny_cpu.yaml", "tiny_vllm_cpu.yaml", "smollm2_chain_sum.yaml"} <= {path.name for path in CONFIGS}


def test_the_vllm_recipe_differs_from_the_tiny_one_in_engine_and_name_only():
    tiny, vllm = (msgspec.to_builtins(load([CONFIGS[0].parent / name])) for name in ("tiny_cpu.yaml", "tiny_vllm_cpu.yaml"))
    tiny["rollout"]["engine"], tiny["run"]["name"] = "vllm", "tiny_vllm_cpu"
    assert tiny == vllm


def test_a_reference_is_named_only_where_there_is_one(tmp_path):
    """Else the saved configuration of a run without a KL could not be used with another model.path: a base that was moved."""
    path = write(tmp_path, "c.yaml", "model: {path: m}\ndata: {}\n")
    assert resolve(load([path])).ref.path is None
    assert resolve(load([path], ["actor.use_kl_loss=true"])).ref.path == resolve(load([path])).model.path
