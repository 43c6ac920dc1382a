// SPDX-License-Identifier: Apache-2.0
// Parts of a training step: AutocastGuard, GradScaler, clip_grad_norm_.
#pragma once

#include <weft/engine/training/autocast.h>
#include <weft/engine/training/clip_grad_norm.h>
#include <weft/engine/training/grad_scaler.h>
#include <weft/group.h>
