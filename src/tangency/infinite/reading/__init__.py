"""From an nn.Module to layers of infinite width.

`traced` is the module as a layer. `graphs` gets its graph by torch.fx, `faithful` refuses what a graph would pass over
(hooks, weights made of others). One run over the graph then makes a `calls.Call` of every node: modules go to their
readers in `modules` and `sequences`, functions and methods to the rules that the tables of `functional` name
(`arithmetic`: sums, products, matrices; `tensors`: shapes and indices).

A second way to read modules, which runs forward() under a torch function mode instead of tracing it, would stand beside
`traced` as another `Layer` that makes the same Calls: readers and rules know nothing of fx. `compose.as_layer` is the
one place that decides how a module is read.
"""
