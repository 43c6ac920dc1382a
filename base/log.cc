// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <memory>

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>

namespace weft::log {

namespace {

thread_local std::string label;

constinit ForkMutex sink_mutex(ForkOrder::Capture);
std::function<void(LogLevel, std::string_view)> captured WEFT_GUARDED_BY(sink_mutex);
std::atomic<bool> capturing{false};

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::Off: return spdlog::level::off;
    case LogLevel::Error: return spdlog::level::err;
    case LogLevel::Warn: return spdlog::level::warn;
    case LogLevel::Info: return spdlog::level::info;
    case LogLevel::Debug: return spdlog::level::debug;
  }
  broken("no such LogLevel");
}

// Also held while a line is written, so that locks inside spdlog and the C library's clock are free
// in a forked process.
constinit ForkMutex logger_mutex(ForkOrder::Log);
// Never destroyed, because threads may log while the process ends.
std::atomic<spdlog::logger*> made{nullptr};

spdlog::logger* make_logger() WEFT_REQUIRES(logger_mutex) {
  auto* fresh = new spdlog::logger("weft", std::make_shared<spdlog::sinks::stderr_color_sink_st>());
  fresh->set_pattern("weft %H:%M:%S.%e %L %v");
  try {
    fresh->set_level(to_spdlog(config().log));
  } catch (const Error& error) {
    fresh->set_level(spdlog::level::warn);
    fresh->warn(error.text());
  }
  return fresh;
}

spdlog::logger& logger() {
  spdlog::logger* known = made.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  MutexLock lock(logger_mutex);
  known = made.load(std::memory_order_relaxed);
  if (known == nullptr) made.store(known = make_logger(), std::memory_order_release);
  return *known;
}

}  // namespace

bool enabled(LogLevel level) noexcept { return capturing || logger().should_log(to_spdlog(level)); }

void write(LogLevel level, std::string_view text) noexcept {
  try {
    if (capturing) {
      MutexLock lock(sink_mutex);
      if (captured) return captured(level, text);
    }
    spdlog::logger& to = logger();
    if (!to.should_log(to_spdlog(level))) return;
    MutexLock lock(logger_mutex);
    if (label.empty()) {
      to.log(to_spdlog(level), spdlog::string_view_t(text.data(), text.size()));
    } else {
      to.log(to_spdlog(level), "{} | {}", label, spdlog::string_view_t(text.data(), text.size()));
    }
  } catch (...) {
    // A message that cannot be written must not end a run.
  }
}

void set_thread_label(std::string text) { label = std::move(text); }

Capture::Capture(std::function<void(LogLevel, std::string_view)> sink) {
  MutexLock lock(sink_mutex);
  if (captured) broken("two log::Capture at once");
  captured = std::move(sink);
  capturing = true;
}

Capture::~Capture() {
  MutexLock lock(sink_mutex);
  captured = nullptr;
  capturing = false;
}

}  // namespace weft::log
