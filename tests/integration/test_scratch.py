import pytest, pprint
from scratch_ranks import both
@pytest.mark.parametrize("o", [{}, {"bf16": True}, {"gradient_accumulation_steps": 3}, {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True, "cpu_ram_efficient_loading": True}}], ids=str)
def test_trainer(two_ranks, tmp_path, o):
    pprint.pprint(two_ranks.run(both, str(tmp_path), **o)[1], width=200)
