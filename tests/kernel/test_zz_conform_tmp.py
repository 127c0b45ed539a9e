import tests.kernel.test_identity as t
from tests.kernel.test_identity import *
from pathlib import Path
@pytest.fixture(scope="module", params=["many","changed"])
def image(request):
    return request.param, Path(f"/tmp/try/conform/{request.param}-filtered")
