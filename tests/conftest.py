"""Every test runs with eight CPU devices, and compiles fast rather than well: none of them is about speed."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)
