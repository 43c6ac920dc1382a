// libtorch's CUDA half. Nothing of Weft links libtorch_cuda: it costs each process 0.2 s and 350
// MiB at start, GPU or not. It is opened when the program starts, if this machine has a CUDA driver
// with a device; programs that link it themselves get the same library.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

namespace weft::tensor {

class CudaDevices;

// How many CUDA devices libtorch sees; 0 without a driver.
int cuda_device_count();

// Sets CUDA's variables (base/cuda_variables.h) on a machine with a GPU, once a process. Called
// where a program asks Weft for CUDA: it makes a group with a backend for CUDA, or an agent.
void prepare_for_cuda();
// Called where streams are about to wait for flags of Weft's: warns, once a process, if the driver
// had started before prepare_for_cuda() and therefore does not know the variables.
void warn_of_early_cuda();
// That warning's text; late is what set_cuda_variables() returned.
std::string early_cuda_text(const std::string& late);

// While a program's function runs on a thread of Weft's, with these streams current: the context of
// the first one's GPU. libtorch's guards set none, and who first uses cuBLAS in a thread without
// one gets a warning. (A context that has ended is left to the function to find.)
class ContextGuard {
 public:
  ContextGuard(CudaDevices& devices, const std::vector<c10::Stream>& streams) noexcept;

 private:
  std::shared_ptr<void> held_;
};

}  // namespace weft::tensor
