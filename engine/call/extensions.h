// SPDX-License-Identifier: Apache-2.0
// The two extensions of one agent (extension.h). Owned by AgentCore. Usable from every thread; call
// its functions without a lock, because the extensions take their own.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <weft/engine/call/extension.h>

namespace weft::call {

class Extensions {
 public:
  Extensions(std::unique_ptr<ReferenceExtension> references,
             std::unique_ptr<ContextExtension> contexts)
      : references_(std::move(references)), contexts_(std::move(contexts)) {}

  ReferenceExtension& references() { return *references_; }
  ContextExtension& contexts() { return *contexts_; }

  // The functions of Extension, called on both.
  void worker_lost(int rank, std::optional<std::uint16_t> successor) {
    references_->worker_lost(rank, successor);
    contexts_->worker_lost(rank, successor);
  }
  bool concern(int rank) const { return references_->concerns(rank) || contexts_->concerns(rank); }
  void close() {
    references_->close();
    contexts_->close();
  }
  void count(DebugInfo& info) const {
    references_->count(info);
    contexts_->count(info);
  }

 private:
  const std::unique_ptr<ReferenceExtension> references_;
  const std::unique_ptr<ContextExtension> contexts_;
};

}  // namespace weft::call
