from tests.processes.conftest import folder, worker, workers  # noqa: F401
