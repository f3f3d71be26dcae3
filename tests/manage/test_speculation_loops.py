"""Loops whose updates are done later compute the same if each update is also tried in backward, before its step."""

import pytest
from test_deferred_clipping import (  # noqa: F401
    norms_taken,
    test_a_gradient_that_was_looked_at_changed_or_added_to_is_read_again,
    test_a_held_gradient_is_scaled_at_once_and_norms_apart_from_scaling,
    test_clipping_accumulation_and_a_scheduler,
    test_clipping_raises_on_what_is_not_finite,
    test_clipping_reads_no_gradient_and_has_the_same_bits,
    test_grad_scaler_with_a_forced_inf,
    test_grad_scaler_with_a_fused_optimizer_that_unscales_by_itself,
)
from test_deferred_loops import (  # noqa: F401
    test_a_graph_from_before_the_step_is_refused_after_it_as_ever,
    test_a_state_held_across_close_is_not_stale_under_the_next_manager,
    test_any_loop,
    test_frozen_then_unfrozen_layers_and_parameters_without_gradient,
    test_load_state_dict_between_steps,
    test_step_hooks_run_once_on_the_users_thread_and_see_the_finished_step,
    test_two_optimizers_on_one_model,
    test_two_optimizers_on_the_same_parameters,
)
from test_deferred_optimizers import (  # noqa: F401
    test_adamw_with_a_closure_between_deferred_steps,
    test_lbfgs_and_closures_are_stepped_whole,
    test_only_a_class_that_says_so_is_stepped_parameter_by_parameter,
)
from test_deferred_reads import (  # noqa: F401
    test_a_gradient_that_the_user_holds_may_be_changed_after_the_step,
    test_an_alias_taken_before_the_step_is_never_stale,
    test_every_way_of_reading_waits,
    test_step_and_zero_grad_do_not_wait,
)

pytestmark = pytest.mark.usefixtures("late_queue", "speculating")
