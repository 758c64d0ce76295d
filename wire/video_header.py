"""Recognise files of videos by their first bytes. Pure."""

VIDEO_FORMATS = "MP4 or WebM"


def is_video_file(data: bytes) -> bool:
    """True if a file begins as MP4 or WebM does."""
    return data[4:8] == b"ftyp" or data[:4] == b"\x1aE\xdf\xa3"
