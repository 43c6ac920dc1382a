// SPDX-License-Identifier: Apache-2.0
// Kernels from an embedded image, launched through the driver's table. They do not use the CUDA
// runtime, so the tests' fake driver sees every launch.
//
//   Library library(device, image);
//   library.preload(device);
//   launch(stream, library.kernel("scale"), {blocks}, {256}, 0, pointer, 0.5f, elements);
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include <weft/cuda/driver.h>
#include <weft/cuda/stream.h>

namespace weft::cuda {

class Library;

// A grid in blocks, or a block in threads.
struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

// One kernel of a library, for every device. It can be copied freely; the library must outlive it.
class Kernel {
 public:
  const char* name() const { return entry_->name.c_str(); }
  CUkernel native() const { return entry_->native; }
  // The sizes of the parameters, in bytes.
  const std::vector<std::size_t>& parameters() const { return entry_->parameters; }

 private:
  friend class Library;
  struct Entry {
    std::string name;
    CUkernel native = nullptr;
    std::vector<std::size_t> parameters;
  };
  explicit Kernel(const Entry& entry) : entry_(&entry) {}
  const Entry* entry_;
};

// A cubin, a fatbin or PTX (which ends with a zero byte), for all devices of the driver. It belongs
// to no device and no context; the constructor takes a device only because the driver describes a
// kernel's parameters only while some context is current. kernel() and preload() are for set-up, by
// one thread at a time; any thread may launch kernels.
class Library {
 public:
  // Copies the image; loads nothing onto a device yet. Throws Unsupported if the image has no code
  // for the present GPUs, Caller if it is not an image. The device must outlive the library.
  Library(Device& device, std::span<const std::byte> image);
  // Unloads the code, which may wait for the devices that have it; no kernel may be running. A
  // library that ends before its process is better handed to Device::retirement().
  ~Library();
  Library(Library&& other) noexcept;
  Library& operator=(Library&&) = delete;

  // Returns the kernel with this name as in the image: extern "C", or mangled. Throws Caller if
  // there is none.
  Kernel kernel(const std::string& name);

  // Loads every kernel of the library onto the device. Otherwise the driver loads a kernel at its
  // first launch and, under a lock, waits for the device, which never ends if one of its streams
  // waits for a flag. So call this first, at set-up; it may block.
  void preload(Device& device) const;

 private:
  Device& device_;
  CUlibrary native_ = nullptr;
  std::unordered_map<std::string, Kernel::Entry> kernels_;
};

// A launch without types: `parameters` has one pointer for each parameter, `sizes` the sizes that
// they point to.
void launch_untyped(const StreamRef& stream, const Kernel& kernel, Dim3 grid, Dim3 block,
                    unsigned shared_bytes, std::span<void* const> parameters,
                    std::span<const std::size_t> sizes);

// Enqueues the kernel on the stream. The arguments are copied before this returns. Each must have
// exactly the size of the kernel's parameter (otherwise Caller): a literal 1 is an int and not a
// std::size_t. Memory that they point to must live until the stream has executed the kernel.
template <class... Arguments>
void launch(const StreamRef& stream, const Kernel& kernel, Dim3 grid, Dim3 block,
            unsigned shared_bytes, const Arguments&... arguments) {
  static_assert((std::is_trivially_copyable_v<Arguments> && ...),
                "kernel arguments are copied byte by byte");
  static_assert((!std::is_array_v<Arguments> && ...),
                "pass a pointer to device memory, or a struct that holds the array");
  static_assert((!std::is_null_pointer_v<Arguments> && ...),
                "pass a null pointer of the parameter's type");
  void* const parameters[] = {const_cast<void*>(static_cast<const void*>(&arguments))..., nullptr};
  const std::size_t sizes[] = {sizeof(Arguments)..., 0};
  launch_untyped(stream, kernel, grid, block, shared_bytes,
                 std::span(parameters).first(sizeof...(Arguments)),
                 std::span(sizes).first(sizeof...(Arguments)));
}

}  // namespace weft::cuda
