package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"jbofd/client"
)

// withNamespaces adds the namespaces that this host may use to the error of one that it may not, which a target answers
// with a bare status.
func withNamespaces(ctx context.Context, c *client.Controller, err error) error {
	if err == nil || errors.Is(err, client.ErrUnsupported) {
		return err
	}
	ids, listErr := c.NamespaceIDs(ctx)
	if listErr != nil {
		return err // which says more than that there is no list either
	}
	if len(ids) == 0 {
		return fmt.Errorf("%w; the subsystem shows this host no namespace", err)
	}
	return fmt.Errorf("%w; --nsid must be one of: %s", err, strings.Trim(fmt.Sprint(ids), "[]"))
}
