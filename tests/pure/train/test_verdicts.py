"""Verdicts on pictures: who resists, who pulls away from held-out pictures, and who only differs by noise."""

import pytest
from tessera.train.watch.verdicts import PictureLoss, is_report, judge


def picture(name, relative, step=10):
    return PictureLoss(name, (relative, 4 * relative), (1.0, 4.0), step)


def verdicts(relatives, held_out=(0.95, 0.97), **changes):
    trained = [picture(str(n), relative) for n, relative in enumerate(relatives)]
    report = judge([*trained, *changes.get("trained", [])], [picture(f"unseen {r}", r) for r in held_out])
    return {entry["file"]: entry["verdict"] for entry in report["pictures"]}, report


def test_outliers_to_either_side_are_named_and_the_rest_learns():
    by_name, report = verdicts([0.80, 0.81, 0.79, 0.80, 0.99, 0.50])
    assert by_name == dict.fromkeys("0123", "learns") | {"4": "resists", "5": "pulls away"}
    assert [entry["file"] for entry in report["pictures"]] == ["5", "2", "0", "3", "1", "4"]
    assert report["leave_out"] == ["4"] and report["held_out"] == pytest.approx(0.96)
    assert report["pictures"][0]["relative"] == pytest.approx(0.5)
    assert is_report(report | {"of": 6}) and not is_report(report)


def test_pictures_without_held_out_ones_never_pull_away_and_their_fall_is_learning_too():
    assert verdicts([0.8, 0.8, 0.8, 0.4], held_out=())[0]["3"] == "learns"
    assert verdicts([0.8, 0.8, 0.8, 0.4], held_out=(0.3,))[0]["3"] == "learns"


def test_a_picture_above_the_base_model_resists_unless_most_are():
    assert verdicts([0.99, 0.995, 1.0])[0]["2"] == "resists"
    assert set(verdicts([1.001, 1.002, 1.0])[0].values()) == {"learns"}


def test_differences_of_noise_are_none():
    assert set(verdicts([0.900, 0.901, 0.902, 0.905])[0].values()) == {"learns"}


def test_only_pictures_of_the_last_step_are_ranked():
    by_name, report = verdicts([0.8, 0.8], trained=[picture("old", 0.99, step=5)])
    assert "old" not in by_name and report["step"] == 10


@pytest.mark.parametrize(
    "changed", [{"pictures": [1]}, {"leave_out": [1]}, {"held_out": "x"}, {"median": None}], ids=str
)
def test_values_that_are_no_report_are_not_read_as_one(changed):
    report = verdicts([0.8, 0.8])[1] | {"of": 2}
    assert is_report(report) and not is_report(report | changed) and not is_report(None)
