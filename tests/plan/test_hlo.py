"""Tests that collectives count once per iteration of the loops around them."""

from rrl.plan.hlo import Traffic, collectives

PROGRAM = """
%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(28)
  %p = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%waiting (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]) parameter(0)
  ROOT %any = pred[] custom-call(%p)
}

%layer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %gathered = bf16[4,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}, metadata={op_name="jit(f)/decode_rows/while/body"}
  %held = f32[8] fusion(%x), calls=%piece
  %started = (f32[2], f32[8]) all-gather-start(%y), dimensions={0}
  %done = f32[8] all-gather-done(%started)
}

%piece (p: f32[8]) -> f32[8] {
  %again = bf16[4,8]{1,0} all-gather(%x), channel_id=7, dimensions={0}
}

%token (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = (s32[], f32[8]) while(%t), condition=%condition, body=%layer
  %summed = f32[8]{0} all-reduce(%z), to_apply=%add
}

%known (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %permuted = f32[2] collective-permute(%z)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %outer = (s32[], f32[8]) while(%t), condition=%waiting, body=%token
  %told = (s32[], f32[8]) while(%t), condition=%waiting, body=%known, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_a_loop_counts_with_its_length_if_known_and_once_if_it_depends_on_data():
    assert collectives(PROGRAM) == {
        "all-gather": Traffic(56, 28 * (4 * 8 * 2 + 8 * 4)),
        "all-reduce": Traffic(1, 32),
        "collective-permute": Traffic(3, 24),
    }


def test_parts_of_one_collective_count_once():
    assert PROGRAM.count("channel_id=7") == 2
    assert collectives(PROGRAM)["all-gather"].count == 2 * 28


def test_a_scope_excludes_collectives_outside_it():
    assert collectives(PROGRAM, "decode_rows") == {"all-gather": Traffic(28, 28 * 64)}
