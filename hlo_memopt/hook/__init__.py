"""How planning gets into JAX's compiles.

``tagged``    ``jit``: gives a function a name by which its modules are known.
``scope``     ``optimizing``, ``enable``, ``disable``: every compile inside is ours.
``seam``      wraps JAX's call of the compiler: marks our modules, falls back to a plain compile.
``callback``  what XLA calls with the scheduled module: plan, rewrite, check.
``registry``  the state that these share; the only global state of hlo_memopt.
``planning``  ``plan`` and ``plans``.
"""
