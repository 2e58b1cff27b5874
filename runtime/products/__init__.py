"""Matrix products of host programs: by torch, or by the algorithm of the same library that was measured to be faster.

torch takes cuBLAS's first guess at an algorithm. For products with a short inner dimension, such as a chunk of tokens
gives, others that the library knows are faster on an H200 (`tuned_defaults/products` has by how much). `kgen tune OP`
measures them; a call takes what is known for its device (`kgen.runtime.products.table`), and torch's choice where
nothing is.
"""
