"""Files of rules: what they may hold, and what is said of those that do not."""

import pytest

from lockstep.errors import ConfigError
from lockstep.observe.monitor.alerts import KINDS, Condition, read_rules, rule_lines

GOOD = """
rules:
  - name: loss high
    when: {metric: val/loss, above: 2}
    runs: sweep*
    for_s: 60
    do:
      - print: true
      - webhook: http://127.0.0.1:9/hook
      - command: [/bin/echo, it, came]
        timeout_s: 3
  - {name: silent, when: {no_step_for_s: 300}}
  - {name: nan, when: {not_finite: "*"}}
  - {name: lost, when: {rank_lost: true}}
  - {name: few, when: {ranks_below: 4}, for_steps: 10}
  - {name: slow, when: {efficiency_below: 0.5}}
  - {name: bytes, when: {disk_free_bytes_below: 10_000_000}}
  - {name: share, when: {disk_free_share_below: 0.05}}
  - {name: ended, when: {ended: [failed, killed]}, past: true}
  - {name: digest, when: {digest_differs: true}}
"""


def written(tmp_path, text):
    path = tmp_path / "alerts.yaml"
    path.write_text(text) if isinstance(text, str) else path.write_bytes(text)
    return path


def test_a_file_with_every_kind_of_rule_is_read_and_told(tmp_path):
    rules = read_rules(written(tmp_path, GOOD))
    assert sorted(rule.when.kind for rule in rules.rules) == sorted(KINDS)
    lines = list(rule_lines(rules))
    assert len(lines) == len(KINDS)
    assert lines[0] == (
        "loss high: when metric val/loss above 2 for 60 s; in runs sweep*; then print, "
        "POST to http://127.0.0.1:9/hook, start /bin/echo it came"
    )
    assert lines[8].startswith("ended: when ended failed, killed; in runs *, those that have")
    assert all(line.endswith("then print") for line in lines[1:])


def rule(when="{rank_lost: true}", more=""):
    return f"rules: [{{name: a, when: {when}{more and ', ' + more}}}]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "rules: is missing"),
        ("[1]", "must hold keys and values, holds a list"),
        ("rules: [", "is not valid YAML"),
        (b"\xff\xfe", "cannot be read"),
        ("rules: []", "must have a rule"),
        ("rule: []", "rule: is no key; there are rules"),
        ("rules: [1]", "rules.0"),
        (rule(more="run: x"), "run: is no key; there are name, when, runs, for_s, for_steps, past"),
        ("rules: [{when: {rank_lost: true}}]", "rules.0.name: is missing"),
        ("rules: [{name: '', when: {rank_lost: true}}]", "rules.0.name=''"),
        ("rules: [{name: a}]", "rules.0.when: is missing"),
        (rule("{}"), "must have one of metric, no_step_for_s"),
        (rule("{rank_lost: true, ranks_below: 3}"), "not rank_lost and ranks_below"),
        (rule("{rank_lost: false}"), "rank_lost=False"),
        (rule("{metrc: a}"), "metrc: is no key; there are metric, above, below"),
        (rule("{metric: a}"), "metric needs either above or below"),
        (rule("{metric: a, above: 1, below: 2}"), "metric needs either above or below"),
        (rule("{metric: a, above: much}"), "above='much'"),
        (rule("{metric: a, above: .nan}"), "above=nan"),
        (rule("{rank_lost: true, above: 1}"), "above and below need metric"),
        (rule("{no_step_for_s: 0}"), "no_step_for_s=0"),
        (rule("{no_step_for_s: .inf}"), "no_step_for_s=inf"),
        (rule("{ranks_below: 0}"), "ranks_below=0"),
        (rule("{efficiency_below: 50}"), "efficiency_below=50"),
        (rule("{disk_free_share_below: 0}"), "disk_free_share_below=0"),
        (rule("{disk_free_bytes_below: 1.5}"), "disk_free_bytes_below=1.5"),
        (rule("{ended: []}"), "ended: must name failed, killed or stopped"),
        (rule("{ended: [completed]}"), "ended.0='completed'"),
        (rule(more="for_s: -1"), "for_s=-1"),
        (rule("{no_step_for_s: 9}", "for_steps: 3"), "for_steps: means nothing with no_step_for_s"),
        (rule(more="do: []"), "do: must have an action"),
        (rule(more="do: [{}]"), "must have one of print, webhook, command"),
        (rule(more="do: [{print: true, webhook: 'http://a'}]"), "not print and webhook"),
        (rule(more="do: [{webhook: 'file:///etc/passwd'}]"), "begins with http:// or https://"),
        (rule(more="do: [{webhook: 'http://'}]"), "begins with http:// or https://"),
        (rule(more="do: [{webhook: 'http://a:x/'}]"), "webhook='http://a:x/'"),
        (rule(more='do: [{webhook: "http://a/ b"}]'), "no blanks and control signs"),
        (rule(more="do: [{command: echo hello}]"), "command='echo hello'"),
        (rule(more="do: [{command: []}]"), "must begin with the path of a program"),
        (rule(more="do: [{command: ['']}]"), "must begin with the path of a program"),
        (rule(more='do: [{command: ["a", "\\0"]}]'), "must hold no NUL"),
        (rule(more="do: [{print: true, timeout: 3}]"), "timeout: is no key; there are print, webh"),
        (rule(more="do: [{print: true, timeout_s: 0}]"), "timeout_s=0"),
        (
            "rules: [{name: a, when: {rank_lost: true}}, {name: a, when: {ranks_below: 3}}]",
            "the name 'a' comes twice",
        ),
        ("rules: &a [*a]", "anchors and aliases"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_rules(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert said in str(raised.value)


def test_a_file_that_is_not_there_is_one_message(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_rules(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_rules(tmp_path)


def test_all_problems_of_a_file_are_told_at_once(tmp_path):
    text = "rules: [{name: '', when: {ranks_below: 0}}]"
    with pytest.raises(ConfigError) as raised:
        read_rules(written(tmp_path, text))
    assert len(str(raised.value).splitlines()) == 2


def test_every_key_of_a_condition_is_told_in_the_documentation(pytestconfig):
    page = (pytestconfig.rootpath / "docs/how-to/monitor.md").read_text()
    assert all(f"`{key}`" in page or f"{key}:" in page for key in Condition.model_fields)
