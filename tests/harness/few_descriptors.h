// SPDX-License-Identifier: Apache-2.0
// For tests in which the process has run out of descriptors, or nearly so.
#pragma once

#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include <weft/base/descriptor.h>

namespace weft::harness {

// While it lives, this process may open only `left` more descriptors.
class FewDescriptors {
 public:
  explicit FewDescriptors(int left) {
    ::getrlimit(RLIMIT_NOFILE, &before_);
    const int lowest = Descriptor(::dup(STDERR_FILENO)).get();
    rlimit few = before_;
    few.rlim_cur = static_cast<rlim_t>(lowest + left) + 256;
    ::setrlimit(RLIMIT_NOFILE, &few);
    for (Descriptor one(::dup(STDERR_FILENO)); one; one = Descriptor(::dup(STDERR_FILENO)))
      filler_.push_back(std::move(one));
    filler_.resize(filler_.size() - static_cast<std::size_t>(left));
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }
  FewDescriptors(const FewDescriptors&) = delete;
  FewDescriptors& operator=(const FewDescriptors&) = delete;

 private:
  rlimit before_{};
  std::vector<Descriptor> filler_;
};

}  // namespace weft::harness
