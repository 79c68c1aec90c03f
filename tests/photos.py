"""A few real photographs with captions, from the data that scikit-image and scikit-learn carry in their packages."""

from importlib.resources import files
from pathlib import Path

from PIL import Image

# name: (package, file, crop box or None, caption)
PHOTOS = {
    "astronaut": ("skimage.data", "astronaut.png", (64, 0, 448, 512), "a portrait of an astronaut in an orange suit"),
    "cat": ("skimage.data", "chelsea.png", None, "the face of a ginger cat, close up"),
    "coffee": ("skimage.data", "coffee.png", (0, 30, 600, 367), "a cup of coffee with a spoon on a wooden table"),
    "galaxies": ("skimage.data", "hubble_deep_field.jpg", None, "many distant galaxies in a black sky"),
    "motorcycle": ("skimage.data", "motorcycle_left.png", (0, 0, 741, 400), "a motorcycle in a garage"),
    "rocket": ("skimage.data", "rocket.jpg", (200, 0, 440, 427), "a rocket on its launch pad against a dark sky"),
    "temple": ("sklearn.datasets.images", "china.jpg", (0, 60, 640, 380), "a temple among trees under a blue sky"),
    "flower": ("sklearn.datasets.images", "flower.jpg", (150, 0, 490, 427), "a pink flower with a yellow centre"),
    "photographer": ("skimage.data", "camera.png", None, "a man with a camera on a tripod, black and white"),
}


def write_photos(folder: Path) -> dict[str, tuple[Path, str]]:
    """Write the photographs and their captions to `folder`. Return name: (picture, caption)."""
    folder.mkdir(parents=True, exist_ok=True)
    photos = {}
    for name, (package, file, box, caption) in PHOTOS.items():
        picture = folder / f"{name}.png"
        with files(package).joinpath(file).open("rb") as source, Image.open(source) as image:
            (image.crop(box) if box else image).save(picture)
        picture.with_suffix(".txt").write_text(caption + "\n", encoding="utf-8")
        photos[name] = (picture, caption)
    return photos
