# SPDX-License-Identifier: Apache-2.0
"""glm5_next parts that run on the B12X_MLA_SPARSE backend."""
