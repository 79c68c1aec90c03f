"""Prompts of sliders and erasures: the terms of their targets by hand, and lists that make none."""

import pytest
from tessera.data.concepts.prompts import erasure, slider
from tessera.data.samples import ERASURE, SLIDER
from tiny.train.concepts import erasure_of, slider_of


def weights(concept):
    return {
        term.prompt: {target.text: (target.weight, target.direction) for target in term.targets}
        for term in concept.terms
    }


def test_a_slider_has_a_pair_for_each_attribute_and_a_term_for_each_kept_prompt():
    concept = slider_of(attributes="male\n\n female ", keep="a dog", guidance_scale=3.0)
    assert weights(concept) == {
        "a person, male": {
            "a person, male": (1.0, 0.0),
            "an old person, male": (0.0, 3.0),
            "a young person, male": (0.0, -3.0),
        },
        "a person, female": {
            "a person, female": (1.0, 0.0),
            "an old person, female": (0.0, 3.0),
            "a young person, female": (0.0, -3.0),
        },
        "a dog": {"a dog": (1.0, 0.0)},
    }
    assert concept.probabilities == (0.25, 0.25, 0.5) and slider_of(attributes="a\nb").probabilities == (0.5, 0.5)


def test_one_neutral_prompt_serves_all_pairs_and_an_empty_one_is_the_empty_prompt():
    several = {"positive": "old man\nold woman", "negative": "boy\ngirl"}
    assert list(weights(slider_of(**several))) == ["a person"]
    assert [term.prompt for term in slider_of(**several, neutral="man\nwoman").terms] == ["man", "woman"]
    assert [term.prompt for term in slider_of(neutral=" ", attributes="tall").terms] == ["tall"]
    assert slider_of(neutral="").texts == ["", "an old person", "a young person"]


def test_an_erasure_moves_away_from_its_prompt_by_the_scale():
    assert weights(erasure_of(guidance_scale=1.5, keep="a bus")) == {
        "a red car": {"a car": (2.5, 0.0), "a red car": (-1.5, 0.0)},
        "a bus": {"a bus": (1.0, 0.0)},
    }
    assert weights(erasure_of(guidance_scale=0.0, target="", keep="")) == {"a red car": {"": (1.0, 0.0)}}
    assert erasure_of(erase="a\nb", keep="c").probabilities == (0.25, 0.25, 0.5)


WRONG = [
    (slider_of, {"positive": ""}, "positive is empty; a slider needs a pair of prompts"),
    (slider_of, {"negative": "\n"}, "negative is empty; a slider needs a pair of prompts"),
    (slider_of, {"positive": "a\nb"}, "positive has 2 prompts and negative 1; write one line in negative for each"),
    (slider_of, {"neutral": "a\nb"}, "neutral has 2 prompts and positive 1; write one line for all, or one for each"),
    (slider_of, {"positive": "a young person"}, "both have 'a young person', which makes no direction; change one"),
    (slider_of, {"keep": "\n".join(map(str, range(200)))}, "There are 201 prompts to train; write at most 200"),
    (erasure_of, {"erase": " "}, "erase is empty; write the prompt that the model should forget"),
    (erasure_of, {"target": "a\nb"}, "target has 2 prompts and erase 1; write one line for all, or one for each"),
    (erasure_of, {"target": "a red car"}, "erase and target both have 'a red car', so nothing would change"),
    (erasure_of, {"keep": "a red car"}, "erase and keep both have 'a red car'; remove it from one of them"),
    (erasure_of, {"erase": "x" * 10_001}, "erase"),
]


@pytest.mark.parametrize(("make", "changes", "message"), WRONG)
def test_prompts_that_make_no_concept_are_refused(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_functions_take_every_text_of_their_nodes():
    assert slider("a", "b", "", "", "", 1.0).kind == SLIDER and erasure("a", "", "", 1.0).kind == ERASURE
