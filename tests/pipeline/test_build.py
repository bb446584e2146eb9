"""Each part gets the sections that it acts on."""

import pytest

from streamrl.errors import ConfigError
from streamrl.pipeline.build import build_rank
from tests.learner.fakes import DictStore
from tests.pipeline.tiny import tiny_config


def test_a_rank_loads_the_reference_that_is_configured(tmp_path):
    config = tiny_config("actor.use_kl_loss=true", "ref.path=/nonexistent")
    rank = build_rank(config, DictStore(), tmp_path, tmp_path, 0)
    with pytest.raises(ConfigError, match=r"\$\.ref\.path.*/nonexistent"):
        rank.start(rank.open_rendezvous("127.0.0.1"))
    rank.stop()
