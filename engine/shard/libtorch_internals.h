// SPDX-License-Identifier: Apache-2.0
// Does to tensors and modules what sharding needs and libtorch has no public function for. No other
// file of engine/shard/ reaches into libtorch's protected members, or uses its dispatch keys,
// except meta_tensors.cc; tests/engine/shard/libtorch_internals_test.cc fails if a release of
// libtorch changes them.
//
// A sharded parameter keeps the tensor that the module's member holds, with its whole shape; only
// its memory comes and goes. Views of it, which autograd saves, share its storage and so do the
// same. The tensor and its views carry a dispatch key whose fallback is called before each operator
// that reads them.
//
// Usable from every thread; fill() and release() not while an operator reads the tensor. Nothing
// here blocks, except that an operator blocks while UseHooks::before does.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace torch::nn {
class Module;
}

namespace weft::shard {

class Unit;

// The unit that a shell's storage belongs to, and the place of the parameter in the unit.
struct Belongs {
  std::weak_ptr<Unit> unit;
  std::size_t parameter = 0;
};

// The functions around each operator that has sharded parameters among its arguments, on the
// operator's thread. What they throw, the operator throws.
struct UseHooks {
  void (*before)(const std::vector<Belongs>& used) = nullptr;
  // `changed`: the operator has written to that parameter.
  void (*changed)(const Belongs& parameter) = nullptr;
};
// Called once for a process, before the first become_shell(); later calls do nothing. Throws
// Unsupported if another library of this process uses the dispatch key.
void install(const UseHooks& hooks);

// Turns `member`, a leaf, into a tensor of that shape and dtype without memory, which belongs to
// `belongs`. It requires no gradient until attach(). Access to its memory throws `error`.
void become_shell(const at::Tensor& member, at::IntArrayRef sizes, at::IntArrayRef strides,
                  at::ScalarType dtype, Belongs belongs, const std::string& error);
// Replaces the error of a shell that has no memory at present.
void set_access_error(const at::Tensor& shell, const std::string& error);
// Gives the shell a .grad of which every use throws Caller with that text: gradients are at the
// shards, and an optimizer that was made of the members would step nothing otherwise.
void refuse_gradient(const at::Tensor& shell, const std::string& error);
// True if the program has registered a hook on the tensor and not removed it.
bool has_hooks(const at::Tensor& tensor);
// A storage of that many bytes without memory, which belongs to what the shell belongs to. It
// replaces the shell's storage when the shell gets another device (meta_tensors.h).
c10::Storage storage_without_memory(const at::Tensor& shell, std::size_t bytes, c10::Device device);
// While it lives, operators of this thread take shells for usual tensors.
class WithoutHooks {
 public:
  WithoutHooks();
  ~WithoutHooks();
  WithoutHooks(const WithoutHooks&) = delete;
  WithoutHooks& operator=(const WithoutHooks&) = delete;

 private:
  const bool before_;
};
// True for a tensor that has become a shell, and for its views.
bool is_shell(const at::Tensor& tensor);
// Returns what a shell belongs to; null for other tensors.
const Belongs* belonging(const at::Tensor& tensor);

// Gives the shell memory: `bytes` of `memory` from `offset` on. Keeps `memory` until release().
void fill(const at::Tensor& shell, const at::Tensor& memory, std::size_t offset);
void release(const at::Tensor& shell);
// True between fill() and release().
bool is_filled(const at::Tensor& shell);

// Marks a shard with its unit and its place there. The mark travels with the tensor and its
// detached aliases, not with copies.
void set_owner(const at::Tensor& shard, std::shared_ptr<Unit> unit, std::size_t parameter);
struct Owner {
  std::shared_ptr<Unit> unit;  // null if the tensor is no shard
  std::size_t parameter = 0;
};
Owner owner_of(const at::Tensor& tensor);

// While it lives, the module has no children: parameters() and buffers() are its own.
class WithoutChildren {
 public:
  explicit WithoutChildren(torch::nn::Module& module);
  ~WithoutChildren();
  WithoutChildren(const WithoutChildren&) = delete;
  WithoutChildren& operator=(const WithoutChildren&) = delete;

 private:
  struct Aside;
  torch::nn::Module& module_;
  const std::unique_ptr<Aside> aside_;
};

// The entry `name` of the module's own parameters. Throws Caller if there is none.
at::Tensor& parameter_entry(torch::nn::Module& module, const std::string& name);

}  // namespace weft::shard
