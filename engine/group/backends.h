// SPDX-License-Identifier: Apache-2.0
// Parses ProcessGroupOptions::backend: which backend carries which device.
#pragma once

#include <map>
#include <string>

#include <c10/core/DeviceType.h>

namespace weft::group {

// Carries host memory by default if "weft" cannot be used.
constexpr const char* kFallbackBackend = "gloo";

// Parses "cpu:weft,cuda:nccl" to {device type: backend}. One name stands for both devices, and an
// empty text for that default. Case and blanks do not matter. Throws Caller for a trailing comma, a
// device named twice, an unknown device.
std::map<c10::DeviceType, std::string> parse_backends(const std::string& text);
// True if the text leaves the choice to Weft, which then skips backends that cannot be used on this
// machine.
bool is_default_backend(const std::string& text);
// Returns the given text, or the value of WEFT_BACKEND if the program leaves the choice open.
// Throws Caller, naming the variable, if its value cannot be parsed.
std::string backends_of(const std::string& given);

}  // namespace weft::group
