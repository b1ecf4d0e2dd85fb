"""Every test runs with eight CPU devices."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
