// SPDX-License-Identifier: Apache-2.0
// Distributed autograd: AutogradContext, BackwardMode, BackwardOptions.
#pragma once

#include <weft/engine/autograd/autograd_context.h>
#include <weft/rpc.h>
