package dockercheck

import (
	"context"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
)

// LoadCompose loads compose files as docker compose does in the folder dir: against the schema, with unknown members an
// error, and with the .env file there. A variable of env goes before that file. With no files it finds them itself.
func LoadCompose(ctx context.Context, dir string, env []string, files ...string) (*types.Project, error) {
	options, err := cli.NewProjectOptions(files,
		cli.WithWorkingDirectory(dir),
		cli.WithEnv(env),
		cli.WithEnvFiles(),
		cli.WithDotEnv,
		cli.WithConfigFileEnv,
		cli.WithDefaultConfigPath,
	)
	if err != nil {
		return nil, err
	}
	return options.LoadProject(ctx)
}
