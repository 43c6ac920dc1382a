// SPDX-License-Identifier: Apache-2.0
// Writes each message as one line to stderr: "weft 12:34:56.789 W rank 1 | text". WEFT_LOG sets the
// level. Any thread may log.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include <weft/base/config.h>

namespace weft::log {

bool enabled(LogLevel level) noexcept;
void write(LogLevel level, std::string_view text) noexcept;

inline void error(std::string_view text) noexcept { write(LogLevel::Error, text); }
inline void warn(std::string_view text) noexcept { write(LogLevel::Warn, text); }
inline void info(std::string_view text) noexcept { write(LogLevel::Info, text); }
inline void debug(std::string_view text) noexcept { write(LogLevel::Debug, text); }

// Sets the text before the bar in this thread's messages ("rank 1"). Threads that a rank starts set
// it again.
void set_thread_label(std::string label);

// Sends messages of every level, regardless of WEFT_LOG, to `sink` instead of stderr until it is
// destroyed. Tests use it to count unexpected errors.
class Capture {
 public:
  explicit Capture(std::function<void(LogLevel, std::string_view)> sink);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
};

}  // namespace weft::log
