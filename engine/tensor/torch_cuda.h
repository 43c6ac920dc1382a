// SPDX-License-Identifier: Apache-2.0
// libtorch's CUDA half. Weft does not link libtorch_cuda, which costs each process 0.2 s and 350
// MiB at start, GPU or not. Weft opens it when the program starts, if this machine has a CUDA
// driver with a device. Programs that link libtorch_cuda themselves get the same library.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

namespace weft::tensor {

class CudaDevices;

// Number of CUDA devices that libtorch sees; 0 without a driver.
int cuda_device_count();

// Sets CUDA's variables (base/cuda_variables.h) on a machine with a GPU, once a process. Called
// when a program asks Weft for CUDA: when it makes a group with a backend for CUDA, or an agent.
void prepare_for_cuda();
// Called before streams wait for Weft's flags. Warns, once a process, if the driver started before
// prepare_for_cuda() and therefore does not know the variables.
void warn_of_early_cuda();
// The text of that warning; `late` is the result of set_cuda_variables().
std::string early_cuda_text(const std::string& late);

// While it lives, the CUDA context of the first stream's GPU is current. Used while a program's
// function runs on one of Weft's threads with these streams current: libtorch's guards set no
// context, and the first use of cuBLAS in a thread without one logs a warning. If the context
// cannot be set, the function still runs and finds the error itself.
class ContextGuard {
 public:
  ContextGuard(CudaDevices& devices, const std::vector<c10::Stream>& streams) noexcept;

 private:
  std::shared_ptr<void> held_;
};

}  // namespace weft::tensor
