// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/ddp/flat.h>
#include <weft/engine/zero/shard.h>

namespace weft::parallel {

at::Tensor Shard::whole_memory() const {
  if (flat.defined()) return flat;
  const at::Tensor& first = parameters.front();
  return parameters.size() == 1 && first.is_contiguous() ? first.detach() : at::Tensor();
}

at::Tensor Shard::travelling() const {
  const at::Tensor whole = whole_memory();
  if (whole.defined()) return whole;
  return optimizer ? flatten(parameters) : empty_flat(parameters);
}

void Shard::land(const at::Tensor& flat, const std::vector<at::Tensor>& parameters) {
  if (!parameters.front().is_alias_of(flat)) return unflatten(flat, parameters);
  // The broadcast wrote without autograd, so values that a graph has saved are no longer valid.
  for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
}

}  // namespace weft::parallel
