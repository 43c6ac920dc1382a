// SPDX-License-Identifier: Apache-2.0
#include <weft/base/mutex.h>
#include <weft/cuda/driver.h>
#include <weft/transport/nccl/nccl.h>
#include <weft/transport/nccl/nccl_communicator.h>
#include <weft/transport/registry.h>

namespace weft::transport::nccl {

std::shared_ptr<Communicator> Nccl::join(const JoinOptions& options) {
  if (!options.cuda) {
    throw Error(Blame::Caller, "joining " + place_of(options, name()) +
                                   ": no GPU was given; NCCL carries CUDA tensors only");
  }
  std::shared_ptr<const Library> library;
  {
    MutexLock lock(mutex_);
    if (!library_) {
      auto opened = source_();
      if (!opened) throw opened.error().within("joining " + place_of(options, name()));
      library_ = std::move(opened).value();
    }
    library = library_;
  }
  return std::make_shared<NcclCommunicator>(options, std::move(library));
}

Result<std::shared_ptr<Transport>> open() {
  const auto driver = cuda::Driver::open();
  if (!driver) return driver.error();
  int devices = 0;
  const CUresult counted = driver.value()->device_get_count(&devices);
  if (counted != CUDA_SUCCESS) return cuda::error_of(*driver.value(), counted, "cuDeviceGetCount");
  if (devices == 0)
    return Error(Blame::Unsupported,
                 "this process sees no GPU: there is none, or CUDA_VISIBLE_DEVICES hides it");
  return std::shared_ptr<Transport>(std::make_shared<Nccl>([] { return Library::open(); }));
}

}  // namespace weft::transport::nccl
