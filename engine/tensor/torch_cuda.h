// libtorch's CUDA half. Nothing of Weft links libtorch_cuda: it costs each process 0.2 s and 350 MiB at start, GPU or not.
// It is opened when the program starts, if this machine has a CUDA driver with a device; programs that link it themselves
// get the same library.
#pragma once

namespace weft::tensor {

// How many CUDA devices libtorch sees; 0 without a driver.
int cuda_device_count();

}  // namespace weft::tensor
