import os

os.environ["HF_HUB_OFFLINE"] = "1"  # every model is made here; nothing is fetched

import pytest
import torch
import transformers


@pytest.fixture(autouse=True, scope="session")
def quiet_and_alone():
    torch.set_num_threads(1)  # these models are too small to share out
    transformers.logging.set_verbosity_error()
