"""What the processor and its libraries are fast at, as far as they say it themselves."""

import torch

MKL = torch.backends.mkl.is_available()
"""Whether torch multiplies float32 by Intel's library, with which all was measured."""

_ABLE = torch.cpu.get_capabilities()
FLOAT16 = bool(_ABLE.get("avx512_fp16") or _ABLE.get("amx_fp16"))
BFLOAT16 = bool(_ABLE.get("avx512_bf16") or _ABLE.get("amx_bf16"))
"""Whether it has instructions for products of these; it is faster at them than at float32."""
AMX = bool(_ABLE.get("amx_tile"))
"""Whether it multiplies whole tiles of bfloat16, in which case torch's fused operator is another one."""
