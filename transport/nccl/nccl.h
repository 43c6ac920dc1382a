// SPDX-License-Identifier: Apache-2.0
// NCCL as a backend. The first join opens the library, which takes 200 MiB and some time.
#pragma once

#include <functional>

#include <weft/base/mutex.h>
#include <weft/transport/nccl/library.h>
#include <weft/transport/transport.h>

namespace weft::transport::nccl {

class Nccl final : public Transport {
 public:
  using Source = std::function<Result<std::shared_ptr<const Library>>()>;
  explicit Nccl(Source source) : source_(std::move(source)) {}

  std::string_view name() const override { return "nccl"; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Cuda; }
  // Requires JoinOptions::cuda. Throws Unsupported, with the places that were tried, if no usable
  // NCCL is found.
  std::shared_ptr<Communicator> join(const JoinOptions& options) override;

 private:
  Source source_;
  Mutex mutex_;
  std::shared_ptr<const Library> library_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::nccl
