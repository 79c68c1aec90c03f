"""Number of shapes that a run's graphs are compiled for."""

from collections import defaultdict

from ...data.samples import GraphKey, Sample, TrainingData
from ...models.family import Family
from ..config.settings import TrainSettings


def count_graphs(data: TrainingData, family: Family, settings: TrainSettings) -> int:
    """Count the shapes in which batches reach a block.

    ComfyUI's own forward runs samples of different sizes or text lengths separately, so any number of a batch's samples
    may have one shape.
    """
    guided = settings.objective.guidance_loss_scale > 0
    if not family.whole_grids:
        return len(data.graph_keys(empty=guided))
    together: dict[GraphKey, list[Sample]] = defaultdict(list)
    for sample in data.samples:
        together[sample.graph_key].append(sample)
    shapes = set()
    for samples in together.values():
        captions = {(s.grid, *key) for s in samples for key in s.graph_keys}
        empty = {(s.grid, s.tokens, s.references, s.empty_length) for s in samples if guided and s.empty_length}
        for forms in (captions, empty):
            sizes = range(1, settings.batch_size + 1) if len(forms) > 1 else (settings.batch_size,)
            shapes |= {(size, *form) for size in sizes for form in forms}
    return len(shapes)
