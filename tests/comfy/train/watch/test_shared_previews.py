"""Several devices make the previews of a run together, and rank 0 has the sheet of all."""

import pytest
from tiny.train.ranks import STEP, errors_of

SHORT = STEP | {"steps": 2, "gradient_accumulation": 1, "batch_size": 2}


@pytest.mark.parametrize("shard", [False, True])
def test_the_pictures_are_those_of_one_device(shard, ranks, tiny_files, tmp_path):
    memory = {"checkpointing": "none", "blocks_to_swap": 3, "shard": shard}
    job = {"previews": 3, "vae": str(tiny_files["vae"])}
    files = []
    sheets = []
    sampled = []
    for size in (1, 2):
        answers = ranks.train(size, tmp_path / str(size), SHORT | {"memory": memory}, **job)
        assert not any(errors_of(answers)), answers
        sampled.append([answer["sampled"] for answer in answers])
        files.append(answers[0]["summary"]["previews"]["files"])
        (folder,) = (tmp_path / str(size)).iterdir()
        sheets.append({path.name: path.read_bytes() for path in (folder / "previews").iterdir()})
    assert files[0] == files[1] == [f"previews/step{step:06d}_{row}.png" for step in range(3) for row in range(3)]
    assert sampled == [[9], [3, 6]]
    assert sheets[0].keys() == sheets[1].keys()
    # Before the first step the LoRA is the same to the bit.
    assert [sheets[0][f"step000000_{row}.png"] for row in range(3)] == [
        sheets[1][f"step000000_{row}.png"] for row in range(3)
    ]


def test_a_preview_that_fails_on_one_device_is_told_once(ranks, tiny_files, tmp_path):
    answers = ranks.train(2, tmp_path, SHORT, previews=2, vae=str(tiny_files["vae"]), fails=1)
    assert not any(errors_of(answers)), answers
    (note,) = (note for note in answers[0]["notes"] if "preview" in note)
    assert "no colours left" in note and "step 1" in note
    assert [name[9:20] for name in answers[0]["summary"]["previews"]["files"]] == 2 * ["step000000_"] + 2 * [
        "step000002_"
    ]
