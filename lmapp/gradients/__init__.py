"""What happens to gradients, as pure functions.

`clipping`, `norms` (of a whole run), `updates` (of a network's parts); `truncation` (where it cuts), `decay` (against
lag; `records`: of a task), `influence` (on one prediction), `weight_lags` (which lags weights learn from); `jacobians`
(products with ∂S_t/∂S_{t−1}), `spectrum`, `bounds`, `gates`; `regulariser`. README.md says how to read them.
"""
