// SPDX-License-Identifier: Apache-2.0
// The fake driver's libraries and kernels: any image is accepted, and its kernels are those that
// the test has defined.
#include <algorithm>
#include <cstring>

#include <weft/tests/harness/fake_state.h>

namespace weft::harness {

FakeLibrary* FakeState::find(CUlibrary handle, CUresult& error) {
  FakeLibrary* const library = object_of(libraries, handle);
  error = CUDA_SUCCESS;
  if (library != nullptr && !library->unloaded) return library;
  error = refuse(CUDA_ERROR_INVALID_HANDLE, "a library was used that is not loaded");
  return nullptr;
}

CUresult FakeState::library_load_data(CUlibrary* library, const void* image, CUjit_option*, void**,
                                      unsigned, CUlibraryOption*, void**, unsigned) {
  if (image == nullptr) return CUDA_ERROR_INVALID_VALUE;
  auto& made = libraries.emplace_back(std::make_unique<FakeLibrary>());
  for (const auto& [text, definition] : definitions) {
    auto& kernel = kernels.emplace_back(std::make_unique<FakeKernel>());
    kernel->library = made.get();
    kernel->definition = &definition;
    made->kernels[text] = kernel.get();
  }
  *library = handle_of<CUlibrary>(made.get());
  return CUDA_SUCCESS;
}

CUresult FakeState::library_unload(CUlibrary handle) {
  CUresult error = CUDA_SUCCESS;
  FakeLibrary* const library = find(handle, error);
  if (library == nullptr) return error;
  ++host_blocks;
  for (const auto& stream : streams) {
    for (const Operation& operation : stream->queue) {
      if (operation.function == Function::launch_kernel)
        complain("a library was unloaded while kernels are enqueued");
    }
  }
  library->unloaded = true;
  return CUDA_SUCCESS;
}

CUresult FakeState::library_get_kernel(CUkernel* kernel, CUlibrary handle, const char* text) {
  CUresult error = CUDA_SUCCESS;
  const FakeLibrary* const library = find(handle, error);
  if (library == nullptr) return error;
  const auto found = library->kernels.find(text);
  if (found == library->kernels.end()) return CUDA_ERROR_NOT_FOUND;
  *kernel = handle_of<CUkernel>(found->second);
  return CUDA_SUCCESS;
}

CUresult FakeState::library_get_kernel_count(unsigned* count, CUlibrary handle) {
  CUresult error = CUDA_SUCCESS;
  const FakeLibrary* const library = find(handle, error);
  if (library == nullptr) return error;
  *count = static_cast<unsigned>(library->kernels.size());
  return CUDA_SUCCESS;
}

CUresult FakeState::library_enumerate_kernels(CUkernel* out, unsigned count, CUlibrary handle) {
  CUresult error = CUDA_SUCCESS;
  const FakeLibrary* const library = find(handle, error);
  if (library == nullptr) return error;
  for (const auto& [text, kernel] : library->kernels) {
    if (count-- == 0) break;
    *out++ = handle_of<CUkernel>(kernel);
  }
  return CUDA_SUCCESS;
}

CUresult FakeState::kernel_get_function(CUfunction* function, CUkernel handle) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  FakeKernel* const kernel = object_of(kernels, handle);
  if (kernel == nullptr || kernel->library->unloaded) return CUDA_ERROR_INVALID_HANDLE;
  auto& made = functions.emplace_back(std::make_unique<FakeFunction>());
  *made = {kernel, context};
  *function = handle_of<CUfunction>(made.get());
  return CUDA_SUCCESS;
}

CUresult FakeState::kernel_get_param_info(CUkernel handle, std::size_t index, std::size_t* offset,
                                          std::size_t* bytes) {
  CUresult error = CUDA_SUCCESS;
  if (current(error) == nullptr) return error;
  const FakeKernel* const kernel = object_of(kernels, handle);
  if (kernel == nullptr || kernel->library->unloaded) return CUDA_ERROR_INVALID_HANDLE;
  const auto& sizes = kernel->definition->sizes;
  if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  // Parameters are aligned to their sizes, up to eight bytes.
  *offset = 0;
  for (std::size_t i = 0; i <= index; ++i) {
    const std::size_t alignment = std::min<std::size_t>(8, sizes[i] & (~sizes[i] + 1));
    *offset = (*offset + alignment - 1) / alignment * alignment;
    if (i < index) *offset += sizes[i];
  }
  *bytes = sizes[index];
  return CUDA_SUCCESS;
}

CUresult FakeState::func_load(CUfunction handle) {
  CUresult error = CUDA_SUCCESS;
  FakeContext* const context = current(error);
  if (context == nullptr) return error;
  const FakeFunction* const function = object_of(functions, handle);
  if (function == nullptr || function->context != context) return CUDA_ERROR_INVALID_HANDLE;
  auto& loaded = function->kernel->loaded;
  if (std::find(loaded.begin(), loaded.end(), context) == loaded.end()) loaded.push_back(context);
  return CUDA_SUCCESS;
}

CUresult FakeState::launch_kernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                                  unsigned grid_z, unsigned block_x, unsigned block_y,
                                  unsigned block_z, unsigned shared_bytes, CUstream stream,
                                  void** parameters, void** extra) {
  CUresult error = CUDA_SUCCESS;
  const FakeStream* const found = find(stream, error);
  if (found == nullptr) return error;
  FakeContext* const context = found->context;
  const FakeFunction* const function = object_of(functions, handle);
  FakeKernel* const kernel = function != nullptr ? function->kernel : object_of(kernels, handle);
  if (kernel == nullptr || kernel->library->unloaded) {
    return refuse(CUDA_ERROR_INVALID_HANDLE, "a kernel was launched that is not loaded");
  }
  if (std::size_t{block_x} * block_y * block_z > 1024 || grid_x * grid_y * grid_z == 0 ||
      block_x * block_y * block_z == 0 || extra != nullptr) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto& loaded = kernel->loaded;
  if (std::find(loaded.begin(), loaded.end(), context) == loaded.end()) {
    // Loading at the first launch waits for the device.
    const CUresult waited =
        block_until([this, context] { return idle(*context); }, *context, Function::launch_kernel);
    if (waited != CUDA_SUCCESS) return waited;
    loaded.push_back(context);
  }
  // Copies the parameters now, because the caller's are gone when the kernel runs.
  auto copies = std::make_shared<std::vector<std::vector<std::byte>>>();
  for (std::size_t i = 0; i < kernel->definition->sizes.size(); ++i) {
    const auto* const bytes = static_cast<const std::byte*>(parameters[i]);
    copies->emplace_back(bytes, bytes + kernel->definition->sizes[i]);
  }
  FakeDriver::Launch launch{
      {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, {}};
  for (auto& copy : *copies) launch.parameters.push_back(copy.data());
  return enqueue(stream, {Function::launch_kernel, "cuLaunchKernel " + kernel->definition->name,
                          [copies, launch = std::move(launch), body = kernel->definition->body] {
                            body(launch);
                            return CUDA_SUCCESS;
                          }});
}

}  // namespace weft::harness
