"""A trace with figures that can be reckoned by hand, for tests of files and of the command."""

from iris.tracing import chrome

# name, rank, track, start, end, target_rank, payload
EVENTS = (
    ("fetch", 0, "SM3", 1000.0, 1010.0, 1, 1000),
    ("fetch", 0, "SM3", 1020.0, 1024.0, 1, 200),
    ("fetch", 0, "SM12", 1001.5, 1002.5, 1, 34),
    ("compute", 0, "SM12", 1003.0, 1043.25, -1, 0),
    ("wait", 0, "SM3", 1010.5, 1019.0, 1, 0),
    ("fetch", 1, "SM0", 1000.0, 1000.5, 0, 8),
    ("compute", 1, "SM0", 1041.0, None, -1, 0),
    ("wait", 1, "SM0", 1001.0, 1031.0, 0, 0),
    ("wait", 1, "SM1", 1001.0, 1013.0, 0, 0),
    ("wait", 1, "host", 1050.0, 1052.0, 2, 0),
)
METADATA = {
    "world_size": 3,
    "gpu_device_name": "Model T",
    "aligned": True,
    "clock_uncertainty_us": [0.0, 2.5, 1.0],
    "dropped_events": {"0": 0, "1": 7, "2": 0},
}


def handmade(path):
    """Writes it and returns its path."""
    events = [
        chrome.event(name, rank, track, start, end, {"target_rank": target, "payload_size": payload})
        for name, rank, track, start, end, target, payload in EVENTS
    ]
    return chrome.write(path, chrome.document(range(3), events, METADATA))
