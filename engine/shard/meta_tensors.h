// SPDX-License-Identifier: Apache-2.0
// Does for OnMeta and materialize() what libtorch has no function for: makes tensors on the meta
// device where no device is named, and gives a tensor memory in place.
// tests/engine/shard/meta_tensors_test.cc fails if a release of libtorch changes what this uses.
//
// Usable from every thread. Nothing here blocks.
#pragma once

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace weft::shard {

// Called once for a process, before the first set_making_on_meta(true); later calls do nothing.
// Throws Unsupported if another library of this process uses the dispatch key.
void install_meta_factories();
// True if this thread makes tensors on the meta device, unless a call names a device or passes a
// tensor.
bool is_making_on_meta();
void set_making_on_meta(bool on);

// While it lives, this thread makes tensors where libtorch makes them.
class MakingAsUsual {
 public:
  MakingAsUsual() : before_(is_making_on_meta()) { set_making_on_meta(false); }
  ~MakingAsUsual() { set_making_on_meta(before_); }
  MakingAsUsual(const MakingAsUsual&) = delete;
  MakingAsUsual& operator=(const MakingAsUsual&) = delete;

 private:
  const bool before_;
};

// The tensor, with all that refers to it, lies in that storage from now on: on its device, and of
// that dtype. Its shape, strides and autograd state stay.
void put_into(const at::Tensor& tensor, c10::Storage storage, at::ScalarType dtype);
// The bytes that the storage of the tensor has, or would have if it was not on the meta device.
std::size_t storage_bytes(const at::Tensor& tensor, at::ScalarType dtype);

}  // namespace weft::shard
