"""The interaction file: every mistake at start-up, and which object a row meets."""

import pytest

from streamrl.errors import ConfigError, SessionFailed
from streamrl.protocol.clock import SystemClock
from streamrl.rollout.interactions import BaseInteraction, check_interactions, load_interactions, register_interaction
from streamrl.rollout.interactions.tutor import TutorInteraction

KEY = "$.rollout.multi_turn.interaction_config_path"


class Echo(BaseInteraction):
    def __init__(self, config):
        if config.get("broken"):
            raise KeyError("wire")
        super().__init__(config)


def load(tmp_path, *entries):
    path = tmp_path / "interactions.yaml"
    path.write_text("interaction:\n" + "".join(f"  - {entry}\n" for entry in entries))
    return load_interactions(str(path))


def test_entries_become_objects_by_name(tmp_path):
    found = load(
        tmp_path, "{name: t, class_name: tutor, config: {max_hints: 1}}", f"{{class_name: '{__name__}:Echo'}}", f"{{name: e, class_name: {__name__}.Echo}}"
    )
    assert found.names == ["e", "t", f"{__name__}:Echo"]
    assert isinstance(found.pick("t"), TutorInteraction) and found.pick("t").name == "t"
    assert isinstance(found.pick("e"), Echo)


def test_a_file_is_loaded_once_per_process(tmp_path):
    first = load(tmp_path, "{class_name: tutor}")
    assert load_interactions(str(tmp_path / "interactions.yaml")) is first


def test_no_file_means_no_interaction():
    none = load_interactions(None)
    assert len(none) == 0 and none.pick(None) is None
    assert none.session({"interaction_kwargs": {}}, "s", 1.0, SystemClock()) is None
    with pytest.raises(SessionFailed):
        none.pick("tutor")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{class_name: nobody}", "registered name"),
        ("{class_name: nowhere.Nothing}", "No module named"),
        (f"{{class_name: '{__name__}:Nothing'}}", "Nothing"),
        ("{class_name: collections.OrderedDict}", "subclass of BaseInteraction"),
        ("{name: t}", "class_name"),
        ("{class_name: tutor, extra: 1}", "extra"),
        ("{class_name: tutor, config: {max_hint: 1}}", "max_hint"),
        ("{class_name: tutor, config: {max_hints: -1}}", "max_hints"),
        ("{class_name: grid, config: {height: 1, width: 1}}", "one cell"),
        ("{class_name: gym, config: {factory: 'nowhere:make'}}", "config.factory"),
        ("{class_name: gym, config: {factory: 'math:pi'}}", "function or class"),
        ("{class_name: gym}", "factory"),
        (f"{{class_name: '{__name__}:Echo', config: {{broken: true}}}}", "KeyError"),
        ("{class_name: tutor}\n  - {class_name: tutor}", "'tutor' twice"),
    ],
)
def test_a_mistake_in_an_entry_is_named_with_the_key(tmp_path, entry, message):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, entry)
    assert str(error.value).startswith(KEY) and message in str(error.value)


@pytest.mark.parametrize("text", ["", "interaction: []", "interactions: [{class_name: tutor}]", "[1]", "interaction: {a: 1}", "{{"])
def test_a_file_of_another_form_is_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError):
        load_interactions(str(tmp_path / "a.yaml"))
    with pytest.raises(ConfigError, match="readable"):
        load_interactions(str(tmp_path / "missing.yaml"))


def test_a_row_without_a_name_gets_the_only_one(tmp_path):
    one = load(tmp_path, "{class_name: tutor}")
    assert one.pick(None) is one.pick("tutor")
    assert one.session(None, "s", 1.0, SystemClock()) is not None
    one.check_names([None, "tutor"])


def test_a_row_without_a_name_cannot_choose_between_two(tmp_path):
    two = load(tmp_path, "{class_name: tutor}", "{class_name: grid}")
    with pytest.raises(SessionFailed, match="got none") as error:
        two.pick(None)
    assert not error.value.retryable
    with pytest.raises(ConfigError, match="got none"):
        two.check_names([None])


@pytest.mark.parametrize("name", ["gird", 7])
def test_an_unknown_name_fails_the_session_for_good_and_the_start_where_rows_are_scanned(tmp_path, name):
    one = load(tmp_path, "{class_name: grid}")
    with pytest.raises(SessionFailed, match="grid") as error:
        one.session({"interaction_kwargs": {"name": name}}, "s", 1.0, SystemClock())
    assert not error.value.retryable
    with pytest.raises(ConfigError, match="interaction_config_path"):
        one.check_names(["grid", name])


def test_a_name_stands_for_one_class():
    register_interaction("test_echo")(Echo)
    register_interaction("test_echo")(Echo)
    with pytest.raises(ValueError, match="second one"):
        register_interaction("test_echo")(TutorInteraction)


def test_a_launch_refuses_a_row_that_asks_for_an_interaction_nobody_declares(tmp_path):
    path = tmp_path / "i.yaml"
    path.write_text("interaction:\n  - {class_name: tutor}\n")
    check_interactions(str(path), ["tutor"])
    check_interactions(None, [])
    for file, names in ((str(path), ["tutr"]), (None, ["tutor"])):
        with pytest.raises(ConfigError, match="is a declared interaction"):
            check_interactions(file, names)
