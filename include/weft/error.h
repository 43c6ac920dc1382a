// SPDX-License-Identifier: Apache-2.0
// weft::Error and weft::Blame, rpc::RemoteError and rpc::CreationError.
#pragma once

#include <weft/base/error.h>
#include <weft/engine/call/errors.h>
