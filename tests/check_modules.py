"""Small scheduled modules in which orders matter, as HLO text."""

from __future__ import annotations

HEAD = "HloModule m, is_scheduled=true"
DUS = """
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  d = f32[8] dynamic-update-slice(a, u, z)
"""
ENTRY = """
ENTRY e {
  p = f32[8] parameter(0)
  u = f32[1] parameter(1)
  z = s32[] constant(0)
  %s
  ROOT t = (f32[8], f32[8]) tuple(r, d)
}
"""
FUSED = """
f {
  fp = f32[8] parameter(0)
  fu = f32[1] parameter(1)
  fz = s32[] constant(0)
  fd = f32[8] dynamic-update-slice(fp, fu, fz)
  ROOT froot = %s
}
"""
SUM = "sum { x = f32[] parameter(0)\n y = f32[] parameter(1)\n ROOT total = f32[] add(x, y) }\n"

# name -> (HLO text, reader, writer): as written the reader stands before the writer of its buffer, and must.
IN_PLACE = {
    "dus": (HEAD + ENTRY % DUS, "r", "d"),
    "dus behind bitcast, barrier and tuple": (
        HEAD
        + ENTRY
        % """
  a = f32[8] negate(p)
  b = f32[2,4] bitcast(a)
  o = f32[2,4] opt-barrier(b)
  q = (f32[2,4]) tuple(o)
  g = f32[2,4] get-tuple-element(q), index=0
  c = f32[8] bitcast(g)
  r = f32[8] exponential(c)
  d = f32[8] dynamic-update-slice(a, u, z)
""",
        "r",
        "d",
    ),
    "fusion": (
        HEAD
        + FUSED % "f32[8] bitcast(fd)"
        + ENTRY % "a = f32[8] negate(p)\n r = f32[8] exponential(a)\n d = f32[8] fusion(a, u), kind=kLoop, calls=f",
        "r",
        "d",
    ),
    "fusion with two outputs": (
        HEAD
        + FUSED % "(f32[1], f32[8]) tuple(fu, fd)"
        + ENTRY
        % """
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  k = (f32[1], f32[8]) fusion(a, u), kind=kLoop, calls=f
  d = f32[8] get-tuple-element(k), index=1
""",
        "r",
        "k",
    ),
    "scatter": (
        HEAD
        + "\n"
        + SUM
        + ENTRY
        % """
  i = s32[1] iota(), iota_dimension=0
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  d = f32[8] scatter(a, i, u), update_window_dims={}, inserted_window_dims={0}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=sum
""",
        "r",
        "d",
    ),
    "custom call": (
        HEAD
        + ENTRY
        % """
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  k = (f32[1], f32[8]) custom-call(u, a), custom_call_target="x", output_to_operand_aliasing={{1}: (1, {})}
  d = f32[8] get-tuple-element(k), index=1
""",
        "r",
        "k",
    ),
    "donated parameter": (
        HEAD
        + ", input_output_alias={ {1}: (0, {}, may-alias) }"
        + ENTRY % "r = f32[8] exponential(p)\n b = f32[8] broadcast(u), dimensions={}\n d = f32[8] negate(b)",
        "r",
        "d",
    ),
    "donated parameter behind a bitcast": (
        HEAD
        + ", input_output_alias={ {1}: (0, {}, must-alias) }"
        + ENTRY
        % """
  c = f32[8] bitcast(p)
  r = f32[8] exponential(c)
  b = f32[2,4] broadcast(u), dimensions={}
  n = f32[2,4] negate(b)
  d = f32[8] bitcast(n)
""",
        "r",
        "n",
    ),
    "all-reduce-start": (
        HEAD
        + "\n"
        + SUM
        + ENTRY
        % """
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  s = f32[8] all-reduce-start(a), replica_groups={}, to_apply=sum
  d = f32[8] all-reduce-done(s)
""",
        "r",
        "s",
    ),
    "async": (
        HEAD
        + """
w {
  wp = f32[8] parameter(0)
  ROOT wc = f32[8] custom-call(wp), custom_call_target="x", output_to_operand_aliasing={{}: (0, {})}
}
"""
        + ENTRY
        % """
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  s = ((f32[8]), f32[8], u32[]) async-start(a), calls=w
  d = f32[8] async-done(s)
""",
        "r",
        "s",
    ),
    "operand of an async copy until its done": (
        HEAD
        + ENTRY
        % """
  a = f32[8] negate(p)
  s = (f32[8], f32[8], u32[]) copy-start(a)
  r = f32[8] copy-done(s)
  d = f32[8] dynamic-update-slice(a, u, z)
""",
        "r",
        "d",
    ),
    "callee": (
        HEAD
        + """
c {
  cp = f32[8] parameter(0)
  cu = f32[1] parameter(1)
  cz = s32[] constant(0)
  ROOT cd = f32[8] dynamic-update-slice(cp, cu, cz)
}
"""
        + ENTRY % "a = f32[8] negate(p)\n r = f32[8] exponential(a)\n d = f32[8] call(a, u), to_apply=c",
        "r",
        "d",
    ),
    "reader in a callee": (
        HEAD
        + "\nc { cp = f32[8] parameter(0)\n ROOT cr = f32[8] exponential(cp) }\n"
        + ENTRY % "a = f32[8] negate(p)\n r = f32[8] call(a), to_apply=c\n d = f32[8] dynamic-update-slice(a, u, z)",
        "r",
        "d",
    ),
}

LOOP = (
    HEAD
    + """
b {
  bp = (s32[], f32[8]) parameter(0)
  bi = s32[] get-tuple-element(bp), index=0
  ba = f32[8] get-tuple-element(bp), index=1
  b1 = s32[] constant(1)
  br = f32[8] exponential(ba)
  bw = f32[8] iota(), iota_dimension=0
  bk = f32[] custom-call(br), custom_call_target="x", custom_call_has_side_effect=true
  bn = s32[] add(bi, b1)
  ROOT bt = (s32[], f32[8]) tuple(bn, bw)
}
c {
  cp = (s32[], f32[8]) parameter(0)
  ci = s32[] get-tuple-element(cp), index=0
  c9 = s32[] constant(9)
  ROOT cc = pred[] compare(ci, c9), direction=LT
}
ENTRY e {
  p = f32[8] parameter(0)
  z = s32[] constant(0)
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  i = (s32[], f32[8]) tuple(z, a)
  w = (s32[], f32[8]) while(i), condition=c, body=b
  g = f32[8] get-tuple-element(w), index=1
  ROOT t = (f32[8], f32[8]) tuple(r, g)
}
"""
)
IN_PLACE["init of a while"] = (LOOP, "r", "w")
IN_PLACE["value carried by a while"] = (LOOP, "br", "bw")
IN_PLACE["counter of a while"] = (LOOP.replace("bk = f32[] custom-call(br)", "bk = f32[] custom-call(bi)"), "bk", "bn")

BRANCH = (
    HEAD
    + """
b0 {
  b0p = (f32[8], f32[1]) parameter(0)
  b0a = f32[8] get-tuple-element(b0p), index=0
  b0u = f32[1] get-tuple-element(b0p), index=1
  b0z = s32[] constant(0)
  b0r = f32[8] exponential(b0a)
  b0d = f32[8] dynamic-update-slice(b0a, b0u, b0z)
  b0s = f32[8] add(b0r, b0d)
  ROOT b0t = (f32[8], f32[8]) tuple(b0s, b0d)
}
b1 {
  b1p = f32[8] parameter(0)
  b1r = f32[8] negate(b1p)
  b1c = f32[8] copy(b1r)
  ROOT b1t = (f32[8], f32[8]) tuple(b1c, b1r)
}
ENTRY e {
  p = f32[8] parameter(0)
  u = f32[1] parameter(1)
  q = pred[] parameter(2)
  a = f32[8] negate(p)
  r = f32[8] exponential(a)
  x = (f32[8], f32[1]) tuple(a, u)
  k = (f32[8], f32[8]) conditional(q, x, p), true_computation=b0, false_computation=b1
  d = f32[8] get-tuple-element(k), index=1
  ROOT t = (f32[8], f32[8]) tuple(r, d)
}
"""
)
IN_PLACE["operand of a conditional"] = (BRANCH, "r", "k")
IN_PLACE["parameter of a branch"] = (BRANCH, "b0r", "b0d")

EFFECTS = (
    HEAD
    + "\n"
    + SUM
    + """
c { cp = f32[8] parameter(0)
 ROOT cs = f32[8] custom-call(cp), custom_call_target="x", custom_call_has_side_effect=true }
ENTRY e {
  p = f32[8] parameter(0)
  a = f32[8] all-reduce(p), replica_groups={}, channel_id=1, to_apply=sum
  b = f32[8] all-reduce(p), replica_groups={}, channel_id=2, to_apply=sum
  g = u64[1] rng-get-and-update-state(), delta=1
  s = f32[8] custom-call(p), custom_call_target="x", custom_call_has_side_effect=true
  k = f32[8] call(p), to_apply=c
  h = f32[8] custom-call(p), custom_call_target="x"
  n = f32[8] negate(h)
  v = f32[8] exponential(n), control-predecessors={k}
  ROOT t = (f32[8], f32[8], u64[1], f32[8], f32[8], f32[8]) tuple(a, b, g, s, k, v)
}
"""
)
