"""Put the images of a request into its texts and their tokens. Pure."""

from scorepool import wire
from scorepool.engine import ChatCodec
from scorepool.worker.inference.text_lengths import invalid_request


def check_images(request: wire.Request, codec: ChatCodec) -> None:
    """Check that the model takes images if the request has some. Raises JobError."""
    if codec.images is not None:
        return
    for field, _ in wire.images_of(request):
        reason = codec.images_unsupported or "it is a model of texts"
        raise invalid_request(field, f"the model takes no images: {reason}")
